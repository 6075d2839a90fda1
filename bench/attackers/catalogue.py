"""The table of all attacks: name -> function."""

from __future__ import annotations

from bench.attackers import grpc, http, lanes, pushes, regions

ATTACKS = grpc.ATTACKS | http.ATTACKS | regions.ATTACKS | pushes.ATTACKS | lanes.ATTACKS
