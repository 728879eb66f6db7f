"""Size a deployment: the instances that a traffic needs, and the cost per million tokens.

`motet plan --traffic` simulates with the policy that the planner runs (`motet_planner.simulator`).
This module converts the command line to requests and instances, and results to tables.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from motet_cli.bench.results.table import duration
from motet_cli.planning.demand import TrafficSummary, read_demand, share
from motet_models.capacity import Plan, Settings, plan
from motet_models.model_shape import ModelShape
from motet_models.roofline import GPUS, Processor, decode_bound, prefill_bound
from motet_planner.outcome import SimulationOutcome, Slo
from motet_planner.prices import Price, read_prices
from motet_planner.sizing import Demand, Sizing, size
from motet_planner.speed import Speed, Steps
from motet_shared.errors import ConfigError
from motet_shared.quantiles import quantile


class DoesNotFit(ConfigError):
    """Report a model that exceeds the memory of a processor."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Hold the served model and its settings.

    efficiency: share of a processor's upper bounds that the engine reaches.
    cached: share of prompt tokens that the prefix cache supplies.
    """

    shape: ModelShape
    settings: Settings
    context: int
    efficiency: float
    cached: float

    def speed(
        self, name: str, price: Price, processor: Processor | None, summary: TrafficSummary
    ) -> tuple[Speed, str]:
        """Return an instance's speed and its source: measured, or the processor's bounds.

        Bounds apply to requests of the mean lengths. Raises ConfigError for an unknown
        processor, DoesNotFit if the model needs more memory.
        """
        if price.prefill_token is not None and price.decode_step is not None:
            steps = tuple(price.decode_step)
            return self._speed(price.prefill_token, steps, price.kv_tokens), "measured"
        if processor is None:
            known = ", ".join([*GPUS, "cpu"])
            raise ConfigError(
                f"--prices: {name!r} is not one of {known}; give such a name, or measured"
                " prefill_token and decode_step",
                param="--prices",
            )
        try:
            memory_plan = plan(self.shape, self.settings, processor.memory, self.context)
        except ConfigError as error:
            raise DoesNotFit(error.message) from None
        prefill = prefill_bound(
            self.shape, processor, self.settings.weights, tokens=summary.prompt
        ).tokens_per_second
        steps = tuple(self._steps(processor, summary.prompt + summary.output // 2))
        speed = self._speed(
            1 / (prefill * self.efficiency), steps, price.kv_tokens or _kv_tokens(memory_plan)
        )
        return speed, f"{self.efficiency:g} of bounds"

    def _speed(self, prefill_token: float, steps: Steps, kv_tokens: int) -> Speed:
        return Speed(
            prefill_token=prefill_token,
            steps=steps,
            kv_tokens=kv_tokens,
            max_running=self.settings.max_running,
            cached=self.cached,
        )

    def _steps(self, processor: Processor, context: int) -> Iterator[tuple[int, float]]:
        sizes = [1 << power for power in range(self.settings.max_running.bit_length())]
        for batch in sorted({*sizes, self.settings.max_running}):
            bound = decode_bound(
                self.shape,
                processor,
                self.settings.weights,
                batch=batch,
                context=context,
                kv=self.settings.kv,
            )
            yield batch, batch / (bound.tokens_per_second * self.efficiency)


def _kv_tokens(memory_plan: Plan) -> int:
    """Return the tokens that the KV cache holds, for sequences of the planned length.

    With sliding windows, a longer sequence takes less memory per token.
    """
    return (
        memory_plan.num_blocks
        * memory_plan.block_bytes
        * memory_plan.context
        // memory_plan.per_sequence
    )


FindProcessor = Callable[
    [str], Processor | None
]  # maps a name in the price list to its processor, or None


def run(
    args: Namespace, shape: ModelShape, settings: Settings, find_processor: FindProcessor
) -> int:
    """Print the offers; return exit code 1 if none of them meets the SLO."""
    prices = _prices(args)
    demand, summary = read_demand(args)
    longest = max(64, 2 * (summary.prompt + summary.output))
    served = ServedModel(
        shape=shape,
        settings=settings,
        context=min(longest, shape.context or longest),
        efficiency=share("--efficiency", args.efficiency),
        cached=share("--cached", args.cached, zero=True),
    )
    offers = [
        _offer(served, demand, summary, name, price, find_processor(name))
        for name, price in prices.items()
    ]
    offers.sort(key=lambda offer: offer.cost)
    if args.json:
        json.dump(_document(args, demand, summary, offers), sys.stdout, indent=1)
        print()
    else:
        _print(args, demand, summary, offers)
    return 0 if any(offer.sizing for offer in offers) else 1


# -------------------------------------------------------------------------------------------------------------- offers
@dataclass(frozen=True, kw_only=True)
class Offer:
    """Hold the result for one entry of the price list.

    source: origin of the speed, measured or bounds.
    reason: why there is no sizing; empty if there is one.
    """

    name: str
    price: Price
    source: str = ""
    sizing: Sizing | None = None
    reason: str = ""

    @property
    def cost(self) -> float:
        """Return the cost per million output tokens of a fixed deployment; infinite without one."""
        return (
            math.inf if self.sizing is None else self.sizing.fixed.per_million(self.price.price)[0]
        )


def _prices(args: Namespace) -> dict[str, Price]:
    if args.prices is None:
        raise ConfigError(
            "--prices: is not given, but --traffic compares costs; give --prices FILE (docs/plan.md)",
            param="--traffic",
        )
    return read_prices(Path(args.prices).expanduser())


def _offer(
    served: ServedModel,
    demand: Demand,
    summary: TrafficSummary,
    name: str,
    price: Price,
    processor: Processor | None,
) -> Offer:
    try:
        speed, source = served.speed(name, price, processor, summary)
    except DoesNotFit as error:
        return Offer(name=name, price=price, reason=error.message)
    found = size(demand, speed, price.cold_start)
    if found is None:
        return Offer(
            name=name,
            price=price,
            source=source,
            reason="too many requests miss the SLO even alone",
        )
    return Offer(name=name, price=price, source=source, sizing=found)


# -------------------------------------------------------------------------------------------------------------- output
def _figures(outcome: SimulationOutcome, slo: Slo, price: Price) -> dict[str, float]:
    output, total = outcome.per_million(price.price)
    return {
        "instances": outcome.mean_instances,
        "share": outcome.share(slo),
        "goodput": outcome.goodput(slo),
        "ttft_p50": quantile(outcome.ttft or (0.0,), 0.5),
        "ttft_p95": quantile(outcome.ttft or (0.0,), 0.95),
        "itl_p95": quantile(outcome.itl or (0.0,), 0.95),
        "misses": outcome.requests - outcome.kept(slo),
        "cost_per_hour": outcome.mean_instances * price.price,
        "per_million_output": output,
        "per_million_total": total,
    }


def _document(
    args: Namespace, demand: Demand, summary: TrafficSummary, offers: list[Offer]
) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for offer in offers:
        entry: dict[str, Any] = {
            "name": offer.name,
            "price": offer.price.price,
            "speed": offer.source,
        }
        if (sizing := offer.sizing) is None:
            found.append(entry | {"why_not": offer.reason})
            continue
        fixed = _figures(sizing.fixed, demand.slo, offer.price) | {"instances": sizing.instances}
        scaled = _figures(sizing.scaled, demand.slo, offer.price) | {
            "most": sizing.scaled.replicas.most * demand.sample
        }
        entry |= {"streams": sizing.streams, "fixed": fixed, "policy": asdict(sizing.policy)}
        found.append(entry | {"autoscaled": scaled, "replicas": sizing.scaled.replicas.points})
    slo = {name: value for name, value in asdict(demand.slo).items() if value < math.inf}
    return {
        "model": args.model,
        "traffic": {**asdict(summary), "seconds": demand.seconds, "sample": demand.sample},
        "slo": {**slo, "share": demand.share},
        "offers": found,
    }


def _print(args: Namespace, demand: Demand, summary: TrafficSummary, offers: list[Offer]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    limits = [
        f"{name.upper()} ≤ {duration(limit)}"
        for name, limit in asdict(demand.slo).items()
        if limit < math.inf
    ]
    console.print(
        f"{args.model}: {summary.rate:,.3g} requests/s for {duration(demand.seconds)}, on average"
        f" {summary.prompt:,} tokens in and {summary.output:,} out; {demand.share:.4g} of them with"
        f" {', '.join(limits) or 'any latency'}"
    )
    if demand.sample > 1:
        console.print(
            f"simulated with 1 of {demand.sample} requests: instances are multiples of {demand.sample}"
        )
    console.print("fixed number of instances", _fixed_table(demand, offers), sep="\n")
    console.print("scaled by the planner", _scaled_table(demand, offers), sep="\n")
    for offer in offers:
        if offer.reason:
            console.print(f"{offer.name}: {offer.reason}")


def _fixed_table(demand: Demand, offers: list[Offer]) -> Table:
    table = _table(
        "on",
        "speed",
        "instances",
        "streams each",
        "SLO met",
        "TTFT p95",
        "ITL p95",
        "cost/h",
        "1M out",
        "1M in+out",
    )
    for offer in offers:
        if (sizing := offer.sizing) is not None:
            figures = _figures(sizing.fixed, demand.slo, offer.price)
            latencies = [
                duration(float(f"{figures[name]:.3g}")) for name in ("ttft_p95", "itl_p95")
            ]
            table.add_row(
                offer.name,
                offer.source,
                f"{sizing.instances:,}",
                f"{sizing.streams:.3g}",
                f"{figures['share']:.2%}",
                *latencies,
                *_costs(figures),
            )
    return table


def _scaled_table(demand: Demand, offers: list[Offer]) -> Table:
    table = _table(
        "on", "target", "instances", "max", "SLO met", "misses", "cost/h", "1M out", "1M in+out"
    )
    for offer in offers:
        if (sizing := offer.sizing) is not None:
            figures = _figures(sizing.scaled, demand.slo, offer.price)
            most = sizing.scaled.replicas.most * demand.sample
            cells = [
                f"{figures['instances']:,.1f}",
                f"{most:,}",
                f"{figures['share']:.2%}",
                f"{figures['misses']:,.0f}",
            ]
            table.add_row(offer.name, f"{sizing.policy.target:.3g} each", *cells, *_costs(figures))
    return table


def _costs(figures: dict[str, float]) -> list[str]:
    return [
        f"{figures[name]:,.2f}"
        for name in ("cost_per_hour", "per_million_output", "per_million_total")
    ]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right")
    return table
