"""SDP offers as Chromium makes them, without a browser."""

from __future__ import annotations

_TRANSPORT = """\
c=IN IP4 0.0.0.0
a=ice-ufrag:089W
a=ice-pwd:JcDPZvL+aVNbRVJ42EL8/oJj
a=ice-options:trickle
a=fingerprint:sha-256 15:63:51:18:EC:4D:51:0A:8F:05:05:9B:F1:76:5F:7A:22:26:DB:3C:C9:4D:D5:5D:05:AD:06:03:05:A2:76:8F
a=setup:actpass
"""
_HEAD = """\
v=0
o=- 5047079440061006379 2 IN IP4 127.0.0.1
s=-
t=0 0
a=group:BUNDLE 0 1
a=msid-semantic: WMS stream
"""
AUDIO = f"""\
m=audio 9 UDP/TLS/RTP/SAVPF 111 63 0
{_TRANSPORT}a=mid:0
a=sendrecv
a=msid:stream track
a=rtcp-mux
a=rtpmap:111 opus/48000/2
a=rtcp-fb:111 transport-cc
a=fmtp:111 minptime=10;useinbandfec=1
a=rtpmap:63 red/48000/2
a=rtpmap:0 PCMU/8000
a=ssrc:1404741595 cname:client
"""
DATA = f"""\
m=application 9 UDP/DTLS/SCTP webrtc-datachannel
{_TRANSPORT}a=mid:1
a=sctp-port:5000
a=max-message-size:262144
"""


def offer(audio: str = AUDIO, data: str = DATA, head: str = _HEAD) -> str:
    """Return an offer of these sections, with the line ends of SDP."""
    return (head + audio + data).replace("\n", "\r\n")


def candidates(*ends: str) -> str:
    """Return lines of candidates, each given as `TRANSPORT PRIORITY ADDRESS PORT typ TYPE`."""
    return "".join(f"a=candidate:{number} 1 {end}\n" for number, end in enumerate(ends))
