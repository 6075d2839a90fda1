"""Runs tensord on Ray Serve: one daemon a node, and a handle that finds one; tensors go to the daemon and not through Ray.

    serve deploy serve.yaml                                    one daemon on each node, with the models of one configuration

    fleet = tensord_ray.Fleet()                                in any task, actor or driver
    logits = fleet.model("digits")({"image": images})["logits"]     a lane on the caller's own node, HTTP to another
    fleet.push("policy", tree, version=17)                     reaches every node, and those that come later

    Fleet ── where? ─▶ Daemon (a replica a node, chosen by Nearest) ─ starts, watches, drains ─▶ tensord serve
    Fleet ── push ───▶ Directory (an actor) ◀─ what is new? ─ Daemon
    Fleet ══ tensors, by tensord_client ═══════════════════════════════════════════════════════▶ tensord serve

This file has to be importable on every node, with the packages tensord and tensord-client (docs/fleet.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import tensord_client
from ray import serve
from ray.actor import ActorHandle
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

#: Seconds until a daemon has to be ready after its start, and to answer what it has when it stops.
START_SECONDS, STOP_SECONDS = 600.0, 60.0
#: Seconds that a daemon waits for news of the directory, and after which one that has not asked is taken for gone.
FOLLOW_SECONDS, LEASE_SECONDS = 5.0, 20.0
#: Seconds after which a caller without a daemon on its own node asks again which one has least to do.
RENEW_SECONDS = 10.0
#: Seconds without any daemon after which the directory ends.
ALONE_SECONDS = 600.0
#: Sets of parameters that the directory keeps for nodes that come later; each lies in Ray's object store.
MAX_SETS = 64
#: Runs a daemon and ends it with the replica, however that ends: its end of the pipe is closed then. Ray kills what is left of a
#: replica, so the daemon hears (PR_SET_PDEATHSIG, SIGTERM) of the end of this process as well.
_GUARD = """
import ctypes, subprocess, sys, threading
daemon = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, 15))
def watch():
    sys.stdin.buffer.read()
    daemon.terminate()
threading.Thread(target=watch, daemon=True).start()
sys.exit(daemon.wait())
"""
_log = logging.getLogger("ray.serve")


class Nearest(RequestRouter):
    """Routes ``Daemon.where`` to the daemon on the caller's own node, else to the one whose workers have least to do.

    The call's ``avoid`` names replicas that the caller has just failed to reach.
    """

    def initialize_state(self, **_: Any) -> None:
        self._node = ray.get_runtime_context().get_node_id()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in order of preference, each in a list of its own."""
        avoided = pending_request.kwargs.get("avoid", ()) if pending_request is not None else ()
        ranked = sorted(candidate_replicas, key=lambda replica: rank(replica, self._node, avoided))
        return [[replica] for replica in ranked]


def rank(replica: RunningReplica, node: str, avoided: Sequence[str]) -> tuple[bool, bool, float, float]:
    """Returns a replica's sort key: those to avoid come last, then those on other nodes, then by load, then by chance."""
    load = float(replica.routing_stats.get("load", 0.0))
    return replica.replica_id.unique_id in avoided, replica.node_id != node, load, random.random()


def directory(app: str) -> ActorHandle:
    """Returns the directory actor of an application, and starts it if it does not run. It outlives updates of the application."""
    options = {"name": f"tensord-directory-{app}", "namespace": "tensord", "lifetime": "detached"}
    actor = ray.remote(Directory)
    return actor.options(
        **options, get_if_exists=True, num_cpus=0, max_concurrency=4096, max_restarts=-1, max_task_retries=-1
    ).remote()


class Directory:
    """Keeps the newest parameters of each set, and hands them to the daemons, which ask for them one push after the other.

    It is an actor that ends when no daemon has asked for a while, or when its node fails. The parameters it keeps are lost then;
    the daemons keep theirs.
    """

    def __init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._serial = 0
        #: Pushed parameters by model and set, in the order of their pushes; each set has its newest alone.
        self._pushes: dict[tuple[str, str], dict[str, Any]] = {}
        #: Replica -> when it asked last, and its answers by serial number.
        self._seen: dict[str, float] = {}
        self._answers: dict[str, dict[int, str]] = {}
        self._news = asyncio.Condition()
        self._ending: asyncio.Task[None] | None = None

    async def _end(self) -> None:
        """Kills this actor once no daemon has called ``follow`` for ALONE_SECONDS."""
        alone = time.monotonic()
        while time.monotonic() - alone < ALONE_SECONDS:
            await asyncio.sleep(5)
            if any(time.monotonic() - seen < LEASE_SECONDS for seen in self._seen.values()):
                alone = time.monotonic()
        ray.kill(ray.get_runtime_context().current_actor)

    async def follow(self, replica: str, incarnation: str, done: int, error: str, wait: float) -> dict[str, Any]:
        """Takes a daemon's result of its last push, and returns the next push as soon as there is one.

        Args:
          replica: the id of the daemon's replica.
          incarnation: the directory's identity that the daemon knows; if the directory has another one, ``done`` does not count.
          done: the serial number of the last push that the daemon has carried out, 0: none.
          error: why that push failed; "": it did not.
          wait: seconds to wait for a push.

        Returns: a dictionary of "incarnation" and "push"; "push" is None where there is nothing new.
        """
        if incarnation != self._incarnation:
            done = 0
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        async with self._news:
            self._seen[replica] = time.monotonic()
            if done:
                waited = {push["serial"] for push in self._pushes.values()}
                former = self._answers.get(replica, {})
                answers = {serial: said for serial, said in former.items() if serial in waited}
                self._answers[replica] = {**answers, done: error}
                self._news.notify_all()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait_for(lambda: self._next(done) is not None), wait)
            return {"incarnation": self._incarnation, "push": self._next(done)}

    def _next(self, done: int) -> dict[str, Any] | None:
        later = [push for push in self._pushes.values() if push["serial"] > done]
        return min(later, key=lambda push: push["serial"], default=None)

    async def leave(self, replica: str) -> None:
        """Removes a daemon that stops, so that no push waits for it."""
        async with self._news:
            self._seen.pop(replica, None)
            self._news.notify_all()

    async def push(self, model: str, set: str, version: int, options: Mapping[str, Any], tree: Any) -> int:
        """Pushes parameters to every daemon. Returns their version once all daemons have them.

        Raises: ValueError: the set has this version or a higher one, or a daemon refuses them; its node is named, and others may
        have them then.
        """
        async with self._news:
            former = self._pushes.get((model, set))
            if former is None and len(self._pushes) >= MAX_SETS:
                raise ValueError(f"{len(self._pushes)} sets of parameters are kept, {MAX_SETS} at most")
            newest = former["version"] if former else 0
            number = version or newest + 1
            if number <= newest:
                raise ValueError(f"number {number} of set '{set}' of model '{model}' is not newer than {newest}")
            self._serial += 1
            # Two daemons on a node share one copy.
            entry = {"model": model, "set": set, "version": number, "options": dict(options), "serial": self._serial}
            entry["tree"] = [ray.put(tree)]
            self._pushes[model, set] = entry
            self._news.notify_all()
            serial, refused = entry["serial"], []
            while True:
                now = time.monotonic()
                self._seen = {replica: seen for replica, seen in self._seen.items() if now - seen < LEASE_SECONDS}
                self._answers = {replica: said for replica, said in self._answers.items() if replica in self._seen}
                if self._pushes.get((model, set)) is not entry:
                    raise ValueError(f"number {number} of set '{set}' of model '{model}' was replaced on its way")
                if all(serial in self._answers.get(replica, {}) for replica in self._seen):
                    break
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 1.0)
            for replica in self._seen:
                said = self._answers[replica][serial]
                refused += [f"{replica}: {said}"] if said else []
            if refused:
                # Nodes that come later get what was there before.
                if former is None:
                    del self._pushes[model, set]
                else:
                    self._pushes[model, set] = former
                raise ValueError("; ".join(refused))
            return number


@serve.deployment(
    max_replicas_per_node=1,
    max_ongoing_requests=4096,
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=0.5,
    graceful_shutdown_timeout_s=2 * STOP_SECONDS + 30,
    request_router_config=RequestRouterConfig(
        request_router_class="tensord_ray:Nearest", request_routing_stats_period_s=2, request_routing_stats_timeout_s=10
    ),
)
class Daemon:
    """The daemon of a node: started with the replica, healthy while it is ready, drained before it is stopped."""

    async def __init__(self, configuration: Mapping[str, Mapping[str, Any]], models: Mapping[str, str]) -> None:
        """Starts the daemon, and returns once it is ready and has all parameters that were pushed before.

        Args:
          configuration: sections with keys, as in tensord.toml. Addresses, ports and sockets are set here.
          models: name -> URL of models that ``tensord fetch`` brings to this node first.

        Raises: RuntimeError: the daemon does not start, with the last lines of its log.
        """
        context = ray.get_runtime_context()
        self._directory = directory(serve.get_replica_context().app_name)
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._node = context.get_node_id()
        self._host = ray.util.get_node_ip_address()
        self._folder = tempfile.mkdtemp(prefix="tensord-ray-")
        self._port, self._agent_port = _free_ports(2)
        self._lines: deque[str] = deque(maxlen=20)
        self._stopping = False
        self._process: subprocess.Popen[str] | None = None
        try:
            repositories = [*configuration.get("repository", {}).get("paths", ())]
            if models:
                repositories.append(os.path.join(self._folder, "models"))
            for name, url in models.items():
                await asyncio.to_thread(self._fetch, name, url)
            self._configure(
                {**configuration, "repository": {**configuration.get("repository", {}), "paths": repositories}}
            )
            self._start()
            await asyncio.to_thread(self._wait_ready)
            self._client = await asyncio.to_thread(tensord_client.connect, self._folder)
            incarnation, done = await self._catch_up()
        except BaseException:
            self._stop()
            raise
        self._following = asyncio.create_task(self._follow(incarnation, done))

    def where(self, avoid: Sequence[str] = ()) -> dict[str, str]:
        """Returns where to send requests: the node, the folder with the sockets for callers on it, and the address for others."""
        if self._stopping:
            raise RuntimeError("the daemon is stopping")
        return {
            "replica": self._replica,
            "node": self._node,
            "folder": self._folder,
            "address": f"{self._host}:{self._port}",
        }

    def check_health(self) -> None:
        """Raises RuntimeError: the daemon is not ready. Serve replaces the replica then."""
        if not self._stopping and (reason := self._unready()):
            raise RuntimeError(f"tensord on {self._host}: {reason}")

    def record_routing_stats(self) -> dict[str, float]:
        """Returns the load that ``Nearest`` compares: 0 to 1, the part of the last seconds in which the workers were busy."""
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection(("127.0.0.1", self._agent_port), 1) as agent,
        ):
            words = agent.makefile().readline().split()
            return {"load": 1 - float(words[-1].rstrip("%")) / 100}
        return {"load": 1.0}

    async def __del__(self) -> None:
        """Stops the daemon. Serve calls this when it sends no more calls to the replica."""
        self._stopping = True
        following = getattr(self, "_following", None)
        if following is not None:
            following.cancel()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._directory.leave.remote(self._replica), 5)
        await asyncio.to_thread(self._stop)

    def _fetch(self, name: str, url: str) -> None:
        folder = os.path.join(self._folder, "models", name)
        done = subprocess.run(
            [sys.executable, "-m", "tensord", "fetch", url, folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:])

    def _configure(self, configuration: Mapping[str, Mapping[str, Any]]) -> None:
        ours: dict[str, dict[str, Any]] = {
            "http": {"address": "0.0.0.0", "port": self._port},
            "grpc": {"enabled": False},
            "metrics": {"port": 0, "agent_port": self._agent_port},
            "clients": {"socket": os.path.join(self._folder, "clients.sock")},
            "supervisor": {
                "control_socket": os.path.join(self._folder, "control.sock"),
                "exit_timeout": STOP_SECONDS / 2,
            },
        }
        with open(os.path.join(self._folder, "tensord.toml"), "w") as file:
            for section in dict.fromkeys([*configuration, *ours]):
                file.write(f"[{section}]\n")
                for key, value in {**configuration.get(section, {}), **ours.get(section, {})}.items():
                    # Scalars and arrays of JSON are TOML as well.
                    file.write(f"{key} = {json.dumps(value)}\n")

    def _start(self) -> None:
        command = [sys.executable, "-m", "tensord", "serve", "--config", os.path.join(self._folder, "tensord.toml")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _GUARD, *command], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Copies the daemon's log into the replica's log, line by line."""
        assert process.stderr is not None
        for line in process.stderr:
            self._lines.append(line)
            _log.info("%s", line.rstrip())

    def _wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while reason := self._unready():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"tensord on {self._host}: {reason}: {''.join(self._lines)}")
            time.sleep(0.1)

    def _unready(self) -> str:
        """Returns why the daemon is not ready; "" if it is."""
        if self._process is None or self._process.poll() is not None:
            return "it has ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/v2/health/ready", timeout=20):
                return ""
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode(errors="replace")
        except OSError as error:
            return str(error)

    def _stop(self) -> None:
        """Drains the daemon, so that requests under way are answered, ends it and removes its folder."""
        process = self._process
        if process is not None and process.poll() is None:
            control = os.path.join(self._folder, "control.sock")
            drain = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", control, "drain", "--wait"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(drain, capture_output=True, timeout=STOP_SECONDS, check=False)
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _catch_up(self) -> tuple[str, int]:
        """Takes all parameters that were pushed before. Returns the directory's incarnation and the last serial number."""
        incarnation, done, error = "", 0, ""
        while True:
            said = await self._directory.follow.remote(self._replica, incarnation, done, error, 0.0)
            incarnation = said["incarnation"]
            if said["push"] is None:
                return incarnation, done
            done, error = said["push"]["serial"], await asyncio.to_thread(self._take, said["push"])
            if error:
                raise RuntimeError(f"parameters that were pushed before: {error}")

    async def _follow(self, incarnation: str, done: int) -> None:
        """Takes parameters as they are pushed, for as long as the replica lives."""
        error = ""
        while True:
            try:
                said = await self._directory.follow.remote(self._replica, incarnation, done, error, FOLLOW_SECONDS)
            except Exception as why:
                _log.warning("the directory of parameters does not answer: %s", why)
                await asyncio.sleep(1)
                continue
            if said["incarnation"] != incarnation:
                incarnation, done, error = said["incarnation"], 0, ""
            if said["push"] is not None:
                done, error = said["push"]["serial"], await asyncio.to_thread(self._take, said["push"])

    def _take(self, push: Mapping[str, Any]) -> str:
        """Pushes parameters into the daemon. Returns why it refuses them, or "".

        It is no error that the daemon has newer ones or does not serve the model.
        """
        try:
            tree = ray.get(push["tree"][0])
            parameters = self._client.model(push["model"]).parameters
            parameters.update(tree, version=push["version"], set=push["set"], **push["options"])
        except (tensord_client.Replaced, tensord_client.NotFound) as error:
            _log.info("parameters of model '%s': %s", push["model"], error)
        except Exception as error:
            return f"{self._host}: {error}"
        return ""


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Builds the Ray Serve application that serve.yaml names.

    Args:
      arguments: "nodes", how many have a daemon; "configuration" and "models" as ``Daemon`` takes them; "node", what each replica
        asks of its node, in the form of ``ray_actor_options``.
    """
    daemon = Daemon.options(
        num_replicas=int(arguments.get("nodes", 1)), ray_actor_options=dict(arguments.get("node") or {"num_cpus": 1})
    )
    return daemon.bind(arguments.get("configuration") or {}, arguments.get("models") or {})


class Fleet:
    """The daemons of an application, for a task, an actor or a driver. Any thread may use it, but not within an event loop."""

    def __init__(self, app: str = "tensord", patience: float = 60.0) -> None:
        """Finds the application. ``patience``: seconds that a call looks for a daemon that takes its request."""
        self._daemons = serve.get_app_handle(app)
        self._directory = directory(app)
        self._node = ray.get_runtime_context().get_node_id()
        self._patience = patience
        self._lock = threading.Lock()
        self._way: _Way | None = None

    def model(
        self, name: str, version: int = 0, *, timeout: float | None = None, parameter_set: str = ""
    ) -> FleetModel:
        """Returns a model as a function; the arguments are those of ``tensord_client.Client.model``."""
        return FleetModel(self, name, {"version": version, "timeout": timeout, "parameter_set": parameter_set})

    def push(self, model: str, tree: Any, *, version: int = 0, set: str = "main", **options: Any) -> int:
        """Pushes parameters to the daemons of all nodes, and to those that come later. Returns the parameters' version.

        ``options`` are those of ``tensord_client``'s ``parameters.update``.

        Raises: ValueError, as Ray wraps it: a node refuses them, or there are newer ones.
        """
        return int(ray.get(self._directory.push.remote(model, set, version, options, tree)))

    @contextlib.contextmanager
    def client(self) -> Iterator[tensord_client.Client]:
        """Yields the client of the nearest daemon, for streams, sequences and shared memory. It stays with that daemon."""
        way = self._enter(())
        try:
            yield way.client
        finally:
            self._exit(way)

    def _enter(self, avoid: Sequence[str]) -> _Way:
        """Returns a connection to the nearest daemon; call ``_exit`` after use.

        Raises tensord_client.Unavailable: no daemon can be reached; or an error of Ray.
        """
        with self._lock:
            way = self._way
            # A fork has its own connections; a daemon on this node is the nearest for as long as it is there.
            stale = way is not None and not way.local and time.monotonic() > way.renewed + RENEW_SECONDS
            if way is None or stale or way.place["replica"] in avoid:
                place = self._daemons.where.remote(avoid=tuple(avoid)).result(timeout_s=max(1.0, self._patience))
                if way is None or place != way.place:
                    local = place["node"] == self._node
                    client = tensord_client.connect(place["folder"] if local else place["address"], patience=0.0)
                    self._retire(way)
                    way = self._way = _Way(client, place, local)
                way.renewed = time.monotonic()
            way.users += 1
            return way

    def _exit(self, way: _Way, failed: bool = False) -> None:
        with self._lock:
            way.users -= 1
            if failed and way is self._way:
                self._way = None
            if way is not self._way:
                self._retire(way)

    def _retire(self, way: _Way | None) -> None:
        """Closes a connection unless a call still uses it."""
        if way is not None and not way.users:
            way.client.close()


class _Way:
    """A connection to a daemon, and how many calls use it now."""

    def __init__(self, client: tensord_client.Client, place: Mapping[str, str], local: bool) -> None:
        self.client, self.place, self.local = client, place, local
        self.renewed = time.monotonic()
        self.users = 0
        self.models: dict[tuple[Any, ...], tensord_client.Model] = {}


class FleetModel:
    """A model of the fleet, called like a function of arrays."""

    def __init__(self, fleet: Fleet, name: str, options: dict[str, Any]) -> None:
        self._fleet, self._name, self._options = fleet, name, options
        self._key = (name, *options.values())

    def __call__(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **own: Any) -> tensord_client.Answer:
        """Sends a request to the nearest daemon, as ``tensord_client.Model`` does, and returns its outputs.

        If the daemon is gone, drains or refuses the request, another one is asked. A request that may have run is not sent again.

        Raises: tensord_client.ServingError: the request failed.
        """
        until, pause, avoid = time.monotonic() + self._fleet._patience, 0.02, []
        while True:
            way = None
            try:
                way = self._fleet._enter(avoid)
                model = way.models.get(self._key)
                if model is None:
                    model = way.models[self._key] = way.client.model(self._name, **self._options)
                answer = model(inputs, outputs=outputs, **own)
            except (tensord_client.Unavailable, ray.exceptions.RayError, RuntimeError, TimeoutError) as error:
                if way is not None:
                    avoid = [*avoid[-7:], way.place["replica"]]
                    self._fleet._exit(way, failed=True)
                if "may have run" in str(error) or time.monotonic() > until:
                    raise
                time.sleep(pause)
                pause = min(1.0, 2 * pause)
            except BaseException:
                if way is not None:
                    self._fleet._exit(way)
                raise
            else:
                self._fleet._exit(way)
                return answer

    def __repr__(self) -> str:
        return f"<FleetModel {self._name}>"


def _free_ports(count: int) -> list[int]:
    """Returns ports that no process uses at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
