"""Build heartbeats of stacks with a bottleneck."""

from __future__ import annotations

from motet_doctor import Layer, ObservationWindow, Snapshot
from motet_shared.messages import PROTOCOL, Heartbeat, ModelCard

SECONDS = 10.0
MACHINE = {"machine_id": 1.0, "cores": 4.0, "machine_steal": 0.0}
# Growth per second of a process that has little to do, and of its machine.
QUIET = {
    "uptime": 1.0,
    "cpu": 0.1,
    "cpu_wait": 0.01,
    "loop_cpu": 0.1,
    "loop_wait": 0.01,
    "machine_cpu": 0.5,
    "engine_busy": 0.2,
}
# Of an engine that decodes well: a hundred steps a second, half of them with a chunk that stretches them by a half.
DECODING = {
    "tokens": 2000.0,
    "decode_steps": 50.0,
    "decode_seconds": 0.4,
    "mixed_steps": 50.0,
    "mixed_seconds": 0.6,
}


def instance(name: str, state: str = "ready", model: str = "m", **load: float) -> list[Heartbeat]:
    """Return two heartbeats with `load`, `SECONDS` apart.

    Values of `QUIET` and `DECODING` grow per second.
    """
    role = name.partition("-")[0]
    grows = QUIET | (DECODING if role == "decode" else {})
    counters = {key: load.pop(key, rate) for key, rate in grows.items()}
    counters |= {
        key: load.pop(key)
        for key in ("recomputed_tokens", "preemptions", "mixed_tokens")
        if key in load
    }
    gauges = (
        MACHINE
        | {"active": 1.0}
        | ({"kv_free": 0.5, "running": 1.0} if role == "decode" else {})
        | load
    )
    return [
        Heartbeat(
            v=PROTOCOL,
            role=role,
            instance=name,
            state=state,
            seq=number,
            models=[ModelCard(name=model, context=99)],
            load=gauges | {key: rate * SECONDS * (9 + number) for key, rate in counters.items()},
        )
        for number in range(2)
    ]


def window(
    *instances: list[Heartbeat], timings: list[dict[str, float]] | None = None
) -> ObservationWindow:
    looks = [
        Snapshot(SECONDS * number, [beats[number] for beats in instances]) for number in range(2)
    ]
    return ObservationWindow.of(looks, timings or [])


def healthy(**changed: list[Heartbeat]) -> list[list[Heartbeat]]:
    parts = {name: instance(f"{name}-1") for name in ("gateway", "tokenizer", "decode")}
    return list((parts | changed).values())


def omni(**changed: list[Heartbeat]) -> list[list[Heartbeat]]:
    """Return a stack of an omni model in stages, each of which computes a fifth of the time."""
    parts = {
        "encoder": instance("encoder-1", engine_busy=0.2),
        "decode": instance("decode-1", engine_busy=0.2),
        "talker": instance("decode-2", model="m-talker", engine_busy=0.2),
        "code2wav": instance("tts-1", engine_busy=0.2),
    }
    return healthy(**(parts | changed))


CASES: dict[str, tuple[list[list[Heartbeat]], Layer]] = {
    "prefill_blocks_decode": (
        healthy(
            decode=instance(
                "decode-1", decode_seconds=0.1, mixed_steps=5.0, mixed_seconds=0.9, mixed_tokens=5e3
            )
        ),
        Layer.L3,
    ),
    "cache_too_small": (healthy(decode=instance("decode-1", recomputed_tokens=500.0)), Layer.L2),
    "hot_instance": (
        [
            *healthy(decode=instance("decode-1", active=9.0, queued=5.0)),
            instance("decode-2", active=1.0, queued=0.0),
        ],
        Layer.L4,
    ),
    "too_few_decode": (
        [
            *healthy(decode=instance("decode-1", active=9.0, queued=5.0)),
            instance("decode-2", active=8.0, queued=4.0),
        ],
        Layer.L4,
    ),
    "stage_limits": (
        omni(talker=instance("decode-2", model="m-talker", engine_busy=0.95, running=4.0)),
        Layer.L4,
    ),
    "gateway_bound": (
        healthy(gateway=instance("gateway-1", cpu=0.95, loop_cpu=0.95, machine_cpu=1.5)),
        Layer.L5,
    ),
    "tokenizer_bound": (
        healthy(tokenizer=instance("tokenizer-1", cpu=0.9, loop_cpu=0.9, machine_cpu=1.5)),
        Layer.L5,
    ),
    "gpu_unused": (
        healthy(
            gateway=instance("gateway-1", gpus=2.0), decode=instance("decode-1", gpus=1.0, gpu=7.0)
        ),
        Layer.L0,
    ),
    "kernels_fallback": (healthy(decode=instance("decode-1", kernels_on_torch=1.0)), Layer.L1),
    "slow_client": (healthy(gateway=instance("gateway-1", unread_replies=2.0)), Layer.L6),
    "cpu_neighbour": (
        healthy(decode=instance("decode-1", cpu=0.5, cpu_wait=0.5, machine_cpu=2.0)),
        Layer.L0,
    ),
    "cpu_full": (
        healthy(decode=instance("decode-1", cpu=3.7, cpu_wait=3.0, machine_cpu=3.95)),
        Layer.L0,
    ),
}
