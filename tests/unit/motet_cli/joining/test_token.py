"""Tokens expire, admit a bounded number of hosts, and are refused by codes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_cli.joining.errors import TokenExpired, TokenUnknown, TokenUsed
from motet_cli.joining.token import Invitations, Token, parse_token
from motet_shared.errors import ConfigError
from support.running.refusals import refuses

FINGERPRINT = hashlib.sha256(b"authority").digest()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_is_read_as_it_was_written() -> None:
    token = Invitations(FINGERPRINT).issue(["decode"], 60, 1)
    again = parse_token(f"  {token.text}\n")
    assert (again.fingerprint, again.secret) == (FINGERPRINT, token.secret)
    assert token.secret not in repr(token)


@given(st.text(max_size=120))
def test_what_is_no_token_is_refused_without_being_shown(text: str) -> None:
    with refuses(ConfigError, "--token") as caught:
        parse_token(f"motet1.{text}")
    assert len(text) < 12 or text not in caught.value.message


def test_a_token_that_lacks_a_character_is_refused() -> None:
    text = Invitations(FINGERPRINT).issue(["decode"], 60, 1).text
    for cut in (text[:-1], text.replace("motet1", "motet2"), text[::-1]):
        with refuses(ConfigError, "--token"):
            parse_token(cut)


def test_a_token_admits_as_many_hosts_as_it_was_issued_for() -> None:
    invitations = Invitations(FINGERPRINT)
    token = invitations.issue(["decode", "tokenizer"], 60, 2)
    for _ in range(2):
        assert invitations.accept(token.secret) == ("decode", "tokenizer")
    with refuses(TokenUsed, "token"):
        invitations.accept(token.secret)


def test_a_token_expires() -> None:
    clock = Clock()
    invitations = Invitations(FINGERPRINT, clock)
    token = invitations.issue(["decode"], 60, 2)
    clock.now += 59.9
    assert invitations.accept(token.secret) == ("decode",)
    clock.now += 0.1
    with refuses(TokenExpired, "token"):
        invitations.accept(token.secret)


@pytest.mark.parametrize("secret", ["", "x", "é"])
def test_another_secret_is_unknown(secret: str) -> None:
    invitations = Invitations(FINGERPRINT)
    invitations.issue(["decode"], 60, 1)
    with refuses(TokenUnknown, "token"):
        invitations.accept(secret)


def test_tokens_of_an_earlier_run_are_unknown() -> None:
    token = Invitations(FINGERPRINT).issue(["decode"], 60, 1)
    with refuses(TokenUnknown, "token"):
        Invitations(FINGERPRINT).accept(token.secret)


def test_the_oldest_of_many_tokens_are_forgotten() -> None:
    invitations = Invitations(FINGERPRINT)
    tokens: list[Token] = [invitations.issue(["decode"], 60, 1) for _ in range(1001)]
    with refuses(TokenUnknown, "token"):
        invitations.accept(tokens[0].secret)
    assert invitations.accept(tokens[1].secret) == ("decode",)
