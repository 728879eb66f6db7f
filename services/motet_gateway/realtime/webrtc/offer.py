"""Check SDP offers before anything is done for them, and complete the answers.

An offer has one audio section with Opus and one data channel, bundled on one transport. Its
candidates are dropped: the client's checks show its addresses. Behind a STUN or TURN server, which
has to be told whom to let in, candidates with public addresses are kept.
"""

from __future__ import annotations

import re

from aiortc.sdp import MediaDescription, SessionDescription

from motet_gateway.http.remote import is_public
from motet_shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter

from .ice import MOST_CANDIDATES

MOST_BYTES = 2**16
_MOST_LINES = 1000
_DIGESTS = ("sha-256", "sha-384", "sha-512")
_CANDIDATE = "a=candidate:"
_OPUS = re.compile(r"(?m)^a=rtpmap:(\d+) opus/48000/2\r\n")


def checked_offer(sdp: str, *, keep_public: bool) -> str:
    """Return an offer that aiortc can be given, with public candidates if `keep_public`.

    Raises PayloadTooLarge, BadRequest or UnsupportedParameter, all with `param` "sdp".
    """
    if len(sdp) > MOST_BYTES:
        message = f"`sdp` has {len(sdp)} characters; at most {MOST_BYTES} are accepted"
        raise PayloadTooLarge(message, param="sdp")
    lines = sdp.splitlines()
    if len(lines) > _MOST_LINES:
        raise _refused(f"has {len(lines)} lines; at most {_MOST_LINES} are accepted")
    if not sdp.startswith("v=0"):
        raise _refused("is not an SDP offer: it begins with `v=0`")
    candidates = [line for line in lines if line.startswith(_CANDIDATE)]
    if len(candidates) > 4 * MOST_CANDIDATES:
        most = 4 * MOST_CANDIDATES
        raise _refused(f"has {len(candidates)} candidates; at most {most} are accepted")
    public = [line for line in candidates if keep_public and _is_public(line)][:MOST_CANDIDATES]
    dropped = {"a=end-of-candidates", *candidates}.difference(public)  # checks may show more
    text = "\r\n".join([line for line in lines if line not in dropped]) + "\r\n"
    audio, data = _check_sections(_parsed(text))
    return _bundled(text, audio, data)


def completed_answer(sdp: str) -> str:
    """Return an answer that asks for Opus' copies of lost packets (RFC 7587, section 6.1)."""
    return _OPUS.sub(
        lambda found: f"{found[0]}a=fmtp:{found[1]} minptime=10;useinbandfec=1\r\n", sdp
    )


def _refused(what: str) -> BadRequest:
    return BadRequest(f"`sdp` {what}", param="sdp")


def _parsed(text: str) -> SessionDescription:
    try:
        return SessionDescription.parse(text)
    except Exception as error:  # the parser asserts, and looks up what must be there
        reason = f"{type(error).__name__}: {error}"[:100]
        raise _refused(f"cannot be read: {reason}") from None


def _check_sections(offer: SessionDescription) -> tuple[str, str]:
    """Return the ids of the two sections. Raises BadRequest or UnsupportedParameter."""
    kinds = [media.kind for media in offer.media]
    if sorted(kinds) != ["application", "audio"]:
        listed = ", ".join(kind[:20] for kind in kinds[:8]) or "none"
        message = f"`sdp` has the sections {listed}; offer one audio track and one data channel"
        raise UnsupportedParameter(message, param="sdp")
    by_kind = {media.kind: media for media in offer.media}
    audio, data = by_kind["audio"], by_kind["application"]
    for media in (audio, data):
        _check_transport(media)
    if not any(codec.mimeType.lower() == "audio/opus" for codec in audio.rtp.codecs):
        raise _refused("offers no Opus, the only codec of calls")
    if not audio.rtcp_mux:
        raise _refused("has no `a=rtcp-mux` in its audio section")
    if data.profile == "DTLS/SCTP" or data.sctp_port is None:
        raise _refused("has no `a=sctp-port` in the section of its data channel")
    bundle = next((group.items for group in offer.group if group.semantic == "BUNDLE"), [])
    if audio.rtp.muxId == data.rtp.muxId or {audio.rtp.muxId, data.rtp.muxId} != set(bundle):
        raise _refused("does not bundle its two sections: `a=group:BUNDLE` names both by `a=mid`")
    return audio.rtp.muxId, data.rtp.muxId


def _check_transport(media: MediaDescription) -> None:
    if media.ice is None or not media.ice.usernameFragment or not media.ice.password:
        raise _refused("has no `a=ice-ufrag` and `a=ice-pwd`")
    if media.ice.iceLite:
        raise _refused("is of an ICE lite client, which sends no checks")
    if len(media.ice.usernameFragment) > 256 or len(media.ice.password) > 256:
        raise _refused("has a longer `a=ice-ufrag` or `a=ice-pwd` than 256 characters")
    if media.dtls is None or not any(
        one.algorithm.lower() in _DIGESTS for one in media.dtls.fingerprints
    ):
        raise _refused("has no `a=fingerprint` of SHA-256 and `a=setup`")


def _bundled(text: str, audio: str, data: str) -> str:
    """Return the offer with its audio section as the first of the bundle, whose transport stays."""
    return re.sub(r"(?m)^a=group:BUNDLE .*$", lambda _: f"a=group:BUNDLE {audio} {data}\r", text)


def _is_public(line: str) -> bool:
    """Return True for the line of a UDP candidate with a public address."""
    words = line.removeprefix(_CANDIDATE).split()
    if len(words) < 8 or words[1] != "1" or words[2].lower() != "udp":
        return False
    # A name would have to be looked up; the ports below are those of servers.
    return is_public(words[4]) and words[5].isdigit() and 1024 <= int(words[5]) < 65536
