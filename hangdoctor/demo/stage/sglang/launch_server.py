"""The launcher: `python -m sglang.launch_server --model-path DIR --tp 4 --device cpu`."""

import sys

from .srt.entrypoints.http_server import launch_server
from .srt.server_args import prepare_server_args

if __name__ == "__main__":
    launch_server(prepare_server_args(sys.argv[1:]))
