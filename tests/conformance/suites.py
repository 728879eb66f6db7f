"""List the clients and suites of others that are run here, unmodified, with pinned versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Define a suite: the script or program that runs it, and the environment that it needs.

    environment: key of `PYTHON`, "node", or "own" for the one that runs the tests. script: in
    `clients`. misses: cases that fail, each with the reason.
    """

    name: str
    title: str
    environment: str
    script: str
    misses: Mapping[str, str] = field(default_factory=dict)


# What pip installs, by environment: clients that can be together share one.
PYTHON: dict[str, tuple[str, ...]] = {
    "clients": (
        "openai==3.52.0",
        "anthropic==2.12.0",
        "openai-agents==0.24.0",
        "ollama==0.6.3",
    ),
    "frameworks": (
        "instructor==1.17.0",
        "langchain-openai==1.7.4",
        "langchain-anthropic==1.7.10",
        "llama-index-llms-openai-like==0.8.1",
        "litellm==1.110.2",
    ),
    "voice": ("pipecat-ai[openai]==1.14.0", "livekit-plugins-openai==1.8.9"),
    "aiperf": ("aiperf==0.13.0",),
    "guidellm": ("guidellm==0.8.1",),
    "bfcl": ("bfcl-eval==2026.3.23", "torch==2.13.0", "soundfile==0.14.0"),
}
# What pip installs for Python 2.7, without dependencies: all are listed.
AUTOBAHN = (
    "autobahntestsuite==25.10.1",
    "argparse==1.4.0",
    "attrs==21.4.0",
    "autobahn==0.10.9",
    "Automat==20.2.0",
    "cffi==1.15.1",
    "constantly==15.1.0",
    "cryptography==3.3.2",
    "enum34==1.1.10",
    "hyperlink==21.0.0",
    "idna==2.10",
    "incremental==16.10.1",
    "ipaddress==1.0.23",
    "jinja2==2.11.3",
    "klein==17.10.0",
    "linecache2==1.0.0",
    "markupsafe==1.1.1",
    "pyasn1==0.5.1",
    "pyasn1-modules==0.3.0",
    "pycparser==2.21",
    "pyOpenSSL==19.1.0",
    "service-identity==18.1.0",
    "setuptools==44.0.0",
    "six==1.16.0",
    "traceback2==1.4.0",
    "Twisted==19.10.0",
    "txaio==2.1.0",
    "typing==3.10.0.0",
    "unittest2==1.1.0",
    "Werkzeug==1.0.1",
    "zope.interface==4.6.0",
)
NODE: dict[str, str] = {
    "openai": "7.57.0",
    "@anthropic-ai/sdk": "1.13.0",
    "ai": "7.0.173",
    "@ai-sdk/openai": "4.0.118",
    "@ai-sdk/openai-compatible": "2.0.92",
    "ollama": "0.6.4",
    "zod": "4.6.7",
}

SUITES = (
    Suite(
        name="open-responses", title="Open Responses", environment="own",
        script="open_responses.py",
    ),
    Suite(
        name="openai-python", title="openai (Python)", environment="clients",
        script="openai_python.py",
    ),
    Suite(
        name="anthropic-python", title="anthropic (Python)", environment="clients",
        script="anthropic_python.py",
    ),
    Suite(
        name="openai-agents", title="openai-agents", environment="clients",
        script="openai_agents.py",
    ),
    Suite(
        name="langchain", title="LangChain", environment="frameworks", script="langchain_python.py"
    ),
    Suite(
        name="llama-index", title="LlamaIndex", environment="frameworks",
        script="llama_index_python.py",
    ),
    Suite(name="litellm", title="LiteLLM", environment="frameworks", script="litellm_python.py"),
    Suite(
        name="instructor", title="instructor", environment="frameworks",
        script="instructor_python.py",
    ),
    Suite(
        name="openai-node", title="openai (JavaScript)", environment="node",
        script="openai_node.mjs",
    ),
    Suite(
        name="anthropic-node", title="@anthropic-ai/sdk", environment="node",
        script="anthropic_node.mjs",
    ),
    Suite(name="vercel-ai", title="Vercel AI SDK", environment="node", script="vercel_ai.mjs"),
    Suite(
        name="ollama-python", title="ollama (Python)", environment="clients",
        script="ollama_python.py",
    ),
    Suite(
        name="ollama-node", title="ollama (JavaScript)", environment="node",
        script="ollama_node.mjs",
    ),
    Suite(
        name="voice-frameworks", title="Pipecat and LiveKit Agents", environment="voice",
        script="voice_frameworks.py",
    ),
)  # fmt: skip
