"""Hold the gateway's end of a WebRTC connection: one track each way, and a data channel."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiortc import (
    RTCBundlePolicy,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamTrack

from motet_gateway.config import GatewayConfig
from motet_shared.errors import BadRequest, MotetError

from . import event_channel, ice
from .microphone import Microphone
from .network import Network
from .offer import checked_offer, completed_answer

log = logging.getLogger(__name__)


class Peer:
    """Answer one offer, and connect. `lose` is called when the connection is over."""

    def __init__(
        self,
        config: GatewayConfig,
        track: MediaStreamTrack,
        microphone: Microphone,
        on_channel: Callable[[RTCDataChannel], None],
        lose: Callable[[], None],
    ):
        self._network = Network.of(config)
        self._keep_public = bool(config.ice_servers)
        servers = [
            RTCIceServer(url, config.ice_username, config.ice_credential)
            for url in config.ice_servers
        ]
        self._connection = RTCPeerConnection(
            # An empty list: aiortc asks a public STUN server by default.
            RTCConfiguration(iceServers=servers, bundlePolicy=RTCBundlePolicy.MAX_BUNDLE)
        )
        self._track, self._microphone, self._lose = track, microphone, lose
        self._connection.on("datachannel", on_channel)
        self._connection.on("connectionstatechange", self._on_state)

    async def answer(self, sdp: str) -> str:
        """Return the answer to an offer; it begins to wait for the client's checks.

        Raises BadRequest for an offer that cannot be answered, Overloaded without a free port.
        """
        offer = checked_offer(sdp, keep_public=self._keep_public)
        connection = self._connection
        connection.addTrack(self._track)
        (transceiver,) = connection.getTransceivers()
        codecs = RTCRtpSender.getCapabilities("audio").codecs
        transceiver.setCodecPreferences([one for one in codecs if one.mimeType == "audio/opus"])
        ice.bind(transceiver.receiver.transport.transport._connection, self._network)
        try:
            await connection.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            # aiortc's own buffer and decoder drop what was lost.
            transceiver.receiver._RTCRtpReceiver__jitter_buffer = self._microphone  # type: ignore[attr-defined]
            assert connection.sctp is not None
            event_channel.bound(connection.sctp, self._lose)
            await connection.setLocalDescription(await connection.createAnswer())
        except MotetError:
            raise
        except Exception as error:  # aiortc raises many kinds for what does not fit together
            log.info("an offer cannot be answered: %r", error)
            reason = f"{type(error).__name__}: {error}"[:100]
            raise BadRequest(f"`sdp` cannot be answered: {reason}", param="sdp") from None
        return self._network.announce(completed_answer(connection.localDescription.sdp))

    async def close(self) -> None:
        """Close the connection, its sockets included; a second call waits for the first."""
        await self._connection.close()

    def _on_state(self) -> None:
        if self._connection.connectionState in ("failed", "closed"):
            self._lose()
