"""Tests what a connection and a client may hold: their shares, and always one lease for who holds nothing."""

from __future__ import annotations

import pytest

from tensord.config.options import Arenas
from tensord.daemon.submit.accounts import Accounts

MIB = 1 << 20
ONE, OTHER, USER = "tcp 10.0.0.1", "tcp 10.0.0.2", "uid 1000"


@pytest.fixture
def accounts() -> Accounts:
    return Accounts(Arenas(byte_size=MIB, max_byte_size=64 * MIB, connection_share=0.25, client_share=0.5), 1024, MIB)


def take(account: object, byte_size: int) -> None:
    account.requests += byte_size  # type: ignore[attr-defined]
    account.client.requests += byte_size  # type: ignore[attr-defined]


def test_a_connection_has_a_share(accounts: Accounts) -> None:
    account = accounts.open(ONE)
    assert not account.owed(64 * MIB), "who holds nothing may have one lease of any size"
    take(account, 10 * MIB)
    assert not account.owed(6 * MIB)
    assert account.owed(6 * MIB + 1)
    assert account.describe_requests(7 * MIB) == (
        f"the requests of this connection take {10 * MIB} bytes, {7 * MIB} more make over {16 * MIB}"
    )


def test_a_client_has_a_share_for_all_its_connections(accounts: Accounts) -> None:
    for _ in range(4):
        take(accounts.open(ONE), 8 * MIB)
    late = accounts.open(ONE)
    assert late.owed(8 * MIB)
    assert late.describe_requests(8 * MIB) == (
        f"the requests of tcp 10.0.0.1 take {32 * MIB} bytes, {8 * MIB} more make over {32 * MIB}"
    )
    # What is smaller has more room: programs of one host cannot be told apart.
    assert not late.owed(MIB)
    take(late, 16 * MIB)
    second = accounts.open(ONE)
    assert second.owed(MIB)
    assert not second.owed(1024)
    for peer in (OTHER, USER):
        assert not accounts.open(peer).owed(8 * MIB)


def test_answers_that_are_not_taken(accounts: Accounts) -> None:
    account, neighbour, other = accounts.open(ONE), accounts.open(ONE), accounts.open(OTHER)
    assert account.may_send("kind")
    account.answers = account.client.answers = 16 * MIB
    assert not account.may_send("kind")
    assert account.describe() == (
        f"this connection has not taken {16 * MIB} bytes of its answers, at most {16 * MIB} may wait for it"
    )
    assert neighbour.may_send("kind")
    account.client.answers = 32 * MIB
    assert neighbour.may_send("kind")
    account.note_bulky("kind")
    assert not neighbour.may_send("kind")
    assert neighbour.may_send("another")
    assert (
        neighbour.describe() == f"{32 * MIB} bytes of answers wait for clients of tcp 10.0.0.1, at most {32 * MIB} may"
    )
    assert other.may_send("kind")


def test_clients_that_are_gone_are_forgotten(accounts: Accounts) -> None:
    stays = accounts.open(ONE)
    holds = accounts.open(OTHER)
    holds.client.answers = 1
    accounts.close(holds)
    for number in range(2000):
        accounts.close(accounts.open(f"tcp 192.168.{number // 250}.{number % 250}"))
    assert len(accounts) < 600
    assert accounts.open(ONE).client is stays.client
    assert accounts.open(OTHER).client is holds.client


def test_kinds_are_bounded(accounts: Accounts) -> None:
    account = accounts.open(ONE)
    for number in range(5000):
        account.note_bulky(number)
    assert len(account.client.bulky) <= 1024
