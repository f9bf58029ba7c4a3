"""What can be known to be wrong before `valuspec serve` starts anything."""

from __future__ import annotations

import os
import socket
import sys

from deployments.settings import AppArgs
from valuspec.errors import ModelError


async def check_store(url: str) -> None:
    """Say here, not only in a replica's log, that the store refuses us; it is no reason to stop."""
    from retrieval.redis_documents import RedisDocuments
    from retrieval.store import StoreError, refusal

    documents = RedisDocuments(url)
    try:
        await documents.ping()
    except StoreError as error:
        text = refusal(error) if error.kind == "auth" else f"the store at REDIS_URL: {error}"
        print(f"valuspec serve: {text}", file=sys.stderr)
    finally:
        await documents.aclose()


def check_ranks(args: AppArgs) -> None:
    """Raise ModelError if the model cannot be split as asked, or there is no device for a rank."""
    num_ranks = args.tensor_parallel_size
    if num_ranks == 1:
        return
    from deployments.loading import check_split

    if args.device == "cuda":
        from torch.cuda import device_count

        num_devices, what = device_count(), "GPUs"
    else:
        num_devices, what = os.cpu_count() or 1, "CPU cores"
    if num_ranks > num_devices:
        raise ModelError(
            f"--tensor-parallel-size {num_ranks} needs {num_ranks} {what}; there are {num_devices}"
        )
    check_split(args)


def check_port(host: str, port: int) -> None:
    """Raise OSError if the port is taken, before anything is started."""
    family = socket.getaddrinfo(host, port)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"cannot listen on {host}:{port} ({error.strerror}); try --port"
            ) from None
