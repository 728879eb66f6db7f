"""Load transformers' processors without their parts for videos, which need torchvision."""

from __future__ import annotations

from typing import Any


def without_videos(found: Any, loaders: Any) -> Any:
    """Return a subclass of a processor that is loaded without its part for videos.

    loaders: transformers' classes that load the parts, by name.
    """

    def parts(_: Any, /, folder: Any, processor_dict: Any = None, **options: Any) -> list[Any]:
        options.pop("subfolder", None)
        return [_part(name, folder, options, loaders) for name in found.get_attributes()]

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else found.check_argument_for_proper_class(self, name, part)

    members = {
        "_get_arguments_from_pretrained": classmethod(parts),
        "check_argument_for_proper_class": check,
        "__module__": found.__module__,
    }
    return type(found.__name__, (found,), members)


def _part(name: str, folder: Any, options: dict[str, Any], loaders: Any) -> Any:
    if "video" in name:
        return None
    return loaders[name].from_pretrained(folder, **options)
