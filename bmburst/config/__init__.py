"""Configurations as frozen dataclasses: fields, files, options of the command line."""

from bmburst.config.build import (
    FieldHelpFormatter,
    Leaf,
    add_options,
    build_config,
    flat,
    from_dict,
    given_options,
    hide_rare,
    leaves,
    option_name,
    overlay,
    read_layer,
    short_help,
    show_rare,
    to_dict,
)
from bmburst.config.fields import check_fields, field, nearest_name
from bmburst.config.files import parse_json, read_config_file, read_json, write_json

__all__ = [
    "FieldHelpFormatter",
    "Leaf",
    "add_options",
    "build_config",
    "check_fields",
    "field",
    "flat",
    "from_dict",
    "given_options",
    "hide_rare",
    "leaves",
    "nearest_name",
    "option_name",
    "overlay",
    "parse_json",
    "read_config_file",
    "read_json",
    "read_layer",
    "short_help",
    "show_rare",
    "to_dict",
    "write_json",
]
