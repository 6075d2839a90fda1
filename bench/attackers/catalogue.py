"""All attacks by their names."""

from __future__ import annotations

from bench.attackers import grpc, http, regions

ATTACKS = grpc.ATTACKS | http.ATTACKS | regions.ATTACKS
