"""Configuration: converts nested frozen dataclasses to and from JSON, YAML and command line options. No torch."""

from bmburst.config.fields import check_fields, field
from bmburst.config.files import parse_json, read_config_file, read_json, write_json
from bmburst.config.names import nearest_name
from bmburst.config.tree import (
    FieldHelpFormatter,
    add_options,
    build_config,
    given_options,
    leaves,
    option_name,
    overlay,
    read_layer,
    to_dict,
)

__all__ = [
    "FieldHelpFormatter",
    "add_options",
    "build_config",
    "check_fields",
    "field",
    "given_options",
    "leaves",
    "nearest_name",
    "option_name",
    "overlay",
    "parse_json",
    "read_config_file",
    "read_json",
    "read_layer",
    "to_dict",
    "write_json",
]
