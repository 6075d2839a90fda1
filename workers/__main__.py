"""Runs a worker process: ``python -m tensord.workers --control-fd N --device cpu:0``. Only the supervisor starts it."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import socket
import sys

import msgspec

from tensord.config import core_list, log
from tensord.config.options import Options
from tensord.shm import child_process, descriptors
from tensord.shm.channel import Channel, ChannelClosed
from tensord.shm.control_records import Start, ToWorkerControl
from tensord.shm.cuda_regions import DeviceLost
from tensord.shm.record import decoder
from tensord.workers.devices import device_cpu
from tensord.workers.devices.device import DeviceName, NoDevice

_log = logging.getLogger("tensord.workers")
#: Freed memory that the process keeps: outputs of several requests of 16 MiB.
_KEPT_BYTE_SIZE = 256 << 20


def main() -> None:
    child_process.end_if_other_version()
    child_process.die_with_parent()
    descriptors.raise_limit()
    child_process.print_by_lines()
    _outlive_signals()
    parser = argparse.ArgumentParser(prog="tensord.workers", description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--device", type=DeviceName.parse, required=True)
    parser.add_argument("--cores", type=core_list.parse, default=(), help="near its GPU")
    arguments = parser.parse_args()
    # Models that look for arguments of their own find none.
    sys.argv[1:] = []
    device_name: DeviceName = arguments.device
    device_name.prepare_environment()
    channel = Channel(socket.socket(fileno=arguments.control_fd), decoder(ToWorkerControl))

    # Off until ``Worker.run``: imported objects stay, and collecting among them takes 80 of the 750 ms of imports (measured).
    gc.disable()
    # Imported after the environment is set, and before waiting: the supervisor scans its repositories meanwhile.
    from tensord.workers.calls import own_processes, own_spans
    from tensord.workers.devices import device_cuda
    from tensord.workers.imports import import_system
    from tensord.workers.worker import Worker

    try:
        start = _receive_start(channel)
    except ChannelClosed:
        return
    options = msgspec.msgpack.decode(start.options, type=Options)
    log.configure(options.log, start.name)
    log.name_traces(own_spans.trace_id)
    if device_name.platform == "cpu":
        if options.workers.pin:
            device_cpu.pin(device_name.index, options.workers.cpu, options.workers.cores)
        device_cpu.limit_threads(options.workers.threads)
    if arguments.cores:
        device_cpu.pin_to(arguments.cores)
    child_process.keep_freed_memory(_KEPT_BYTE_SIZE)
    if device_name.platform == "cuda":
        device_cuda.prepare_environment(options.workers)
    import_system.prepare()
    own_processes.prepare()
    status = 1
    try:
        worker = Worker(channel, options, device_name, device_name.open(options.workers.devices_per_worker))
        worker.run(start.incarnation)
        worker.close()
        status = 0
    except NoDevice as error:
        _log.critical("%s", error)
        status = child_process.NO_DEVICE
    except DeviceLost as error:
        _log.critical("the worker ends, to be replaced: %s", error.message)
    except Exception:
        _log.exception("the worker failed")
    finally:
        # Threads inside models cannot be ended, and must not keep the process.
        logging.shutdown()
        os._exit(status)


def _outlive_signals() -> None:
    # The supervisor decides when the process stops. Handlers that do nothing: had the process ignored the signals, processes
    # that a model starts would ignore them too, and could not be ended.
    former = {number: signal.signal(number, lambda *_: None) for number in child_process.GROUP_SIGNALS}

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, child_process.GROUP_SIGNALS)

    def resume() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, child_process.GROUP_SIGNALS)

    def restore() -> None:
        for number, action in former.items():
            signal.signal(number, action)
        resume()

    # Blocked during a fork: a signal to a child that still has our handlers would be lost.
    os.register_at_fork(before=hold, after_in_parent=resume, after_in_child=restore)
    # The supervisor started this process with them blocked.
    resume()


def _receive_start(channel: Channel) -> Start:
    """Waits for the supervisor's first record, ``Start``, and returns it."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        received = channel.receive()
        if received is None:
            poll.poll()
            continue
        (record, *_), fds = received
        if not isinstance(record, Start):
            raise SystemExit(f"tensord.workers: {type(record).__name__} came before Start")
        # The descriptor that came with it gets the stack reports.
        child_process.enable_stack_report(*fds)
        return record


if __name__ == "__main__":
    main()
