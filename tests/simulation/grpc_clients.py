"""Connections of clients that speak gRPC, by the library h2: single calls, streams of requests, watches of health."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events
import h2.settings
import numpy as np

from tensord.daemon.front.status import NAMES
from tensord.protocol import grpc_service_pb2, health_pb2
from tests.simulation import streamed
from tests.simulation.clients import MOST_BODY, Ask
from tests.simulation.history import Change
from tests.simulation.http_clients import deflated
from tests.simulation.network import Connection, Item
from tests.simulation.regions import Call as RegionCall
from tests.simulation.regions import inputs_of
from tests.simulation.scheduler import SECOND

_SERVICE = "/inference.GRPCInferenceService"
_HEALTH = "/grpc.health.v1.Health"
_UNARY, _STREAM, _WATCH = f"{_SERVICE}/ModelInfer", f"{_SERVICE}/ModelStreamInfer", f"{_HEALTH}/Watch"
_GOAWAY, _HEAD_SIZE, _PREFIX_SIZE = 7, 9, 5
#: A connection of which so many bytes do not come within so many ns is closed: the preface, and the head of the first frame.
_OPENING_SIZE, _OPENING_NS = 24 + _HEAD_SIZE, 10 * SECOND
_CANCEL, _REFUSED_STREAM, _ENHANCE_YOUR_CALM = 8, 7, 11
_CODINGS = {"gzip": 31, "deflate": 15}
_TOO_LARGE, _BROKEN, _NO_CODING = "larger than max", "a message is not valid", "message encoding"
_FINAL, _MARKED = "triton_final_response", "triton_enable_empty_final_response"
_TIMEOUTS = {0.5: "500m", 5.0: "5S"}
_SERVING = health_pb2.HealthCheckResponse.SERVING
#: How the daemon says that a message came too slowly.
_TOO_SLOW = ("a message came at fewer", "a message did not arrive")


@dataclass(eq=False)
class Call:
    """A call, on a stream of its own."""

    path: str
    stream: int
    #: Requests without an answer, in their order.
    asked: deque[Item] = field(default_factory=deque)
    #: Requests with several responses that have not ended, by their numbers.
    several: dict[int, Ask] = field(default_factory=dict)
    #: Requests that have got all their responses, and want no mark of the end: their workers may still die.
    unmarked: dict[int, Ask] = field(default_factory=dict)
    #: How its messages may be compressed.
    coding: str = ""
    #: What waits for the daemon to grant a window: bytes, and the request that ends with them.
    unsent: deque[tuple[bytes, Item | None]] = field(default_factory=deque)
    #: A part of the message that comes next has left.
    cut: bool = False
    #: Its client sends no more.
    half_closed: bool = False
    received: bytearray = field(default_factory=bytearray)
    #: Messages that have come.
    messages: list[bytes] = field(default_factory=list)
    trailers: dict[str, str] = field(default_factory=dict)
    #: A watch: whether the daemon said last that it serves. None: it has said nothing.
    serving: bool | None = None

    @property
    def open(self) -> list[Item]:
        return [*self.asked, *self.several.values()]


class GrpcConnection(Connection):
    """A connection with several calls at a time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config = h2.config.H2Configuration(
            client_side=True,
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self._h2 = h2.connection.H2Connection(config)
        self._calls: dict[int, Call] = {}
        #: The stream on which requests are sent.
        self._stream: Call | None = None
        self._buffer = b""
        #: The connection's calls have no answer because its client was too slow.
        self._is_blamed = False
        #: When its preface had left; 0: it has not. And whether the daemon has acknowledged it.
        self._preface_ns = 0
        self._is_acknowledged = False

    def unanswered(self) -> Iterator[Item]:
        for call in self._calls.values():
            yield from call.open

    def watched(self) -> list[bool | None]:
        return [call.serving for call in self._calls.values() if call.path == _WATCH]

    # ---------------------------------------------------------------------------------------------------------- requests

    def begin(self) -> None:
        self._h2.initiate_connection()
        if self.scheduler.chance.random() < 0.3:
            self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2000})
        if not self.private and self.scheduler.chance.random() < 0.3:
            call = self._open(_WATCH)
            self._say(call, health_pb2.HealthCheckRequest().SerializeToString(), None)
            if self.scheduler.chance.random() < 0.7:
                self._half_close(call)
        self._flush()

    def write(self, item: Item) -> None:
        chance = self.scheduler.chance
        if isinstance(item, RegionCall):
            path, message = item.as_grpc()
            # Its object's name is another one in each run, and so would be the size of the compressed message.
            self._ask(self._open(path, may_code=False), item, message, ends=True)
            return
        if isinstance(item, Change):
            verb = "Load" if item.kind == "load" else "Unload"
            message = getattr(grpc_service_pb2, f"RepositoryModel{verb}Request")(model_name=item.model)
            self._ask(self._open(f"{_SERVICE}/RepositoryModel{verb}"), item, message, ends=True)
            return
        message = _request(item)
        item.wrong = _TOO_LARGE if message.ByteSize() > MOST_BODY else ""
        # Steps of a sequence keep their order in calls of one kind.
        streams = item.step.run.number % 2 if item.step else chance.random() < 0.5
        if item.model in streamed.SEVERAL:
            streams = chance.random() < 0.9
            item.wrong = "" if streams else streamed.REFUSED
            item.marked = not streamed.count(item.input) or chance.random() < 0.5
            if item.marked:
                message.parameters[_MARKED].bool_param = True
        if item.wrong and streams:
            self._ask(self._open(_STREAM), item, message, ends=True)
            return
        if not streams:
            if item.step is not None:
                item.step.run.overtakes = True
            elif not item.wrong and chance.random() < 0.02:
                item.wrong = _BROKEN
            elif chance.random() < 0.15:
                item.timeout = chance.choice(tuple(_TIMEOUTS))
            self._ask(self._open(_UNARY, item.timeout), item, message, ends=True)
            return
        call = self._stream or self._open(_STREAM)
        # A stream that is ended behind a request must have no step of a sequence before it, of which another one follows.
        ends = not any(isinstance(each, Ask) and each.step for each in (*call.asked, item)) and chance.random() < 0.2
        self._ask(call, item, message, ends)
        self._stream = None if ends else call

    def _open(self, path: str, timeout: float | None = None, may_code: bool = True) -> Call:
        number = self._h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "h"), ("te", "trailers")]
        fields.append(("content-type", "application/grpc"))
        if timeout is not None:
            fields.append(("grpc-timeout", _TIMEOUTS[timeout]))
        chance, coding = self.scheduler.chance, ""
        if may_code and chance.random() < 0.3:
            coding = chance.choice(tuple(_CODINGS))
            fields += [("grpc-encoding", coding), ("grpc-accept-encoding", "gzip, deflate")]
        self._h2.send_headers(number, fields)
        call = self._calls[number] = Call(path, number, coding=coding)
        return call

    def _ask(self, call: Call, item: Item, message: Any, ends: bool) -> None:
        if isinstance(item, Ask) and item.model in streamed.SEVERAL and call.path == _STREAM:
            call.several[item.number] = item
        else:
            call.asked.append(item)
        self._say(call, message.SerializeToString(deterministic=True), item)
        if ends:
            self._half_close(call)
        self._flush()

    def _say(self, call: Call, content: bytes, item: Item | None) -> None:
        flag, is_broken = 0, False
        if isinstance(item, Ask) and item.wrong == _BROKEN:
            is_broken, item.wrong = True, _BROKEN if call.coding else _NO_CODING
        if is_broken or (call.coding and self.scheduler.chance.random() < 0.7):
            flag, content = 1, deflated(content, _CODINGS.get(call.coding, 31))
            content = content[:-1] if is_broken else content
        call.unsent.append((struct.pack(">BI", flag, len(content)) + content, item))
        self._pump(call)

    def _half_close(self, call: Call) -> None:
        call.half_closed = True
        self._pump(call)

    def _pump(self, call: Call) -> None:
        """Sends of a call what the windows allow."""
        connection = self._h2
        while call.unsent:
            content, item = call.unsent[0]
            room = min(connection.local_flow_control_window(call.stream), connection.max_outbound_frame_size)
            if room <= 0:
                if call.cut:
                    self.awaits()
                return
            if call.cut:
                self.sends_on()
            part, rest = content[:room], content[room:]
            call.cut = bool(rest)
            ends = not rest and len(call.unsent) == 1 and call.half_closed
            connection.send_data(call.stream, part, end_stream=ends)
            if rest:
                call.unsent[0] = rest, item
                continue
            call.unsent.popleft()
            self._flush(item)
            if ends:
                return
        if call.half_closed:
            connection.end_stream(call.stream)

    def _flush(self, item: Item | None = None) -> None:
        content = self._h2.data_to_send()
        if self.broken:
            return
        if content or item is not None:
            self.put(content, item)

    def _send(self) -> bool:
        did = super()._send()
        if not self._preface_ns and self._sent >= _OPENING_SIZE:
            self._preface_ns = self.scheduler.clock.now_ns
        return did

    def leave(self, item: Item) -> bool:
        call = next((call for call in self._calls.values() if item in call.open), None)
        if call is None:
            return True
        if self.sock is None or self.scheduler.chance.random() < 0.3:
            return False
        self._h2.reset_stream(call.stream, _CANCEL)
        self._flush()
        self._forget(call)
        for other in call.open:
            self.clients.cancelled(other)
        return True

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.stream, None)
        if call.cut:
            self.client.awaiting.pop(self, None)
        if self._stream is call:
            self._stream = None

    # ----------------------------------------------------------------------------------------------------------- answers

    def received(self, data: bytes) -> None:
        buffer = self._buffer + data
        at = 0
        while len(buffer) - at >= _HEAD_SIZE:
            end = at + _HEAD_SIZE + int.from_bytes(buffer[at : at + 3], "big")
            if end > len(buffer):
                break
            if buffer[at + 3] == _GOAWAY:
                # h2 takes nothing more behind it, though calls go on to their end.
                last, code = struct.unpack_from(">II", buffer, at + _HEAD_SIZE)
                self._goes_away(last, code, buffer[at + _HEAD_SIZE + 8 : end])
            else:
                for event in self._h2.receive_data(buffer[at:end]):
                    self._event(event)
            at = end
        self._buffer = buffer[at:]
        self._flush()
        if self.private and not (self._calls or self.waiting):
            self.cut = True
            self.client.busy[self] = None
        elif self.ends and not self._calls and self.scheduler.chance.random() < 0.5:
            self._over()

    def _event(self, event: Any) -> None:
        if isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            for each in list(self._calls.values()):
                if each.unsent:
                    self._pump(each)
            return
        self._is_acknowledged |= isinstance(event, h2.events.SettingsAcknowledged)
        number = getattr(event, "stream_id", None)
        call = self._calls.get(number) if number else None
        if isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if call is not None:
                self._take(call, event.data)
        elif call is None:
            return
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            call.trailers.update(dict(event.headers))  # type: ignore[arg-type]
        elif isinstance(event, h2.events.StreamEnded):
            self._forget(call)
            if call.received:
                self.scheduler.defect(f"{self} ends a call in the middle of an answer")
            self._ended(call, NAMES[int(call.trailers["grpc-status"])], unquote(call.trailers.get("grpc-message", "")))
        elif isinstance(event, h2.events.StreamReset):
            self._forget(call)
            if event.error_code == _REFUSED_STREAM:
                self._ended(call, "REFUSED", "")
            elif event.error_code == _ENHANCE_YOUR_CALM and self.unread:
                for item in call.open:
                    self.clients.left(item)
            else:
                self.scheduler.defect(f"{self} resets a call with error {event.error_code}: {call}")

    def _take(self, call: Call, data: bytes) -> None:
        received = call.received
        received += data
        while len(received) >= _PREFIX_SIZE:
            end = _PREFIX_SIZE + int.from_bytes(received[1:_PREFIX_SIZE], "big")
            if end > len(received):
                return
            content = bytes(received[_PREFIX_SIZE:end])
            if received[0]:
                content = zlib.decompress(content, _CODINGS[call.trailers["grpc-encoding"]])
            del received[:end]
            if call.path == _STREAM:
                self._answered(call, grpc_service_pb2.ModelStreamInferResponse.FromString(content))
            elif call.path == _WATCH:
                call.serving = health_pb2.HealthCheckResponse.FromString(content).status == _SERVING
                self.scheduler.tell(f"{self} is told that the daemon {'serves' if call.serving else 'does not serve'}")
            else:
                call.messages.append(content)

    def _answered(self, call: Call, answer: Any) -> None:
        number = int(answer.infer_response.id or 0)
        if number in call.several:
            self._one_of_several(call, call.several[number], answer)
            return
        if "may not be run twice" in answer.error_message and number in call.unmarked:
            self.clients.judge_lost_end(call.unmarked.pop(number))
            return
        if not call.asked:
            self.scheduler.defect(f"{self} brings an answer that nobody asked for: {answer}")
            return
        ask = call.asked.popleft()
        assert isinstance(ask, Ask)
        if answer.infer_response.id != str(ask.number):
            self.scheduler.defect(f"{ask} got the answer of request {answer.infer_response.id!r}")
        if answer.error_message:
            self.clients.judge_error(ask, "", answer.error_message)
        else:
            self._judge(ask, answer.infer_response)

    def _one_of_several(self, call: Call, ask: Ask, answer: Any) -> None:
        response, parameters = answer.infer_response, answer.infer_response.parameters
        if answer.error_message:
            del call.several[ask.number]
            self.clients.judge_error(ask, "", answer.error_message)
            return
        is_last, x = not response.outputs, ask.input
        said = parameters[_FINAL].bool_param if _FINAL in parameters else None
        # An ensemble may know of its last response that it is that. Of who has left responses are not counted.
        is_end = ask.got + 1 == streamed.count(x) or bool(ask.outcome)
        may_end = ask.model == streamed.FLOW and is_end and not streamed.fails(x)
        marks = bool(said) if may_end else is_last
        if said is not marks or (is_last and not ask.marked):
            self.scheduler.defect(f"{ask} got a response whose mark is wrong: {response}")
        if not is_last:
            self.clients.judge_response(ask, self._outputs(ask, response))
        if marks or not (ask.marked or streamed.fails(x) or ask.got < streamed.count(x)):
            del call.several[ask.number]
            if not is_last:
                call.unmarked[ask.number] = ask
            self.clients.judge_end(ask)

    def _outputs(self, ask: Ask, answer: Any) -> list[Any]:
        raws = zip(answer.outputs, answer.raw_output_contents, strict=True)
        values = {
            output.name: np.frombuffer(content, np.int64)
            if content or ask.use is None
            else self.clients.regions.read(ask, output.name)
            for output, content in raws
        }
        return [values.get(name, np.empty(0, np.int64)) for name in ask.outputs]

    def _judge(self, ask: Ask, answer: Any) -> None:
        self.clients.judge(ask, self._outputs(ask, answer))

    def _ended(self, call: Call, code: str, message: str) -> None:
        """Judges the end of a call."""
        slow = self.clients.was_slow(self) and any(said in message for said in _TOO_SLOW)
        if call.path == _WATCH:
            # Who is told anything has sent all of his request. Of a front that has died, the end may be read a daemon later.
            stopped = self.clients.stopped_ns or not self.front.alive
            may_end = (stopped and code == "OK") or (slow and call.serving is None)
            if call.serving or not may_end:
                self.scheduler.defect(f"a watch over {self} ends, told last {call.serving}: {code}: {message}")
            return
        if code == "OK" and call.path == _STREAM:
            if call.open or not call.half_closed:
                self.scheduler.defect(f"a stream over {self} ends with requests that have no answer: {call.open}")
            return
        if code == "OK":
            item = call.asked.popleft()
            if len(call.messages) != 1:
                self.scheduler.defect(f"{item} got {len(call.messages)} messages")
            elif isinstance(item, Change):
                if isinstance(item, RegionCall):
                    item.read_grpc(call.messages[0])
                self.clients.change_ended(item, "")
            else:
                answer = grpc_service_pb2.ModelInferResponse.FromString(call.messages[0])
                if answer.id != str(item.number):
                    self.scheduler.defect(f"{item} got the answer of request {answer.id!r}")
                self._judge(item, answer)
            return
        for item in call.open:
            if slow and item.sent_ns:
                # Those of a stream that had come before are given up with it.
                self.clients.left(item)
            elif code == "REFUSED" or slow or (message == "the server is stopping" and self.refused_now(item)):
                self.clients.not_taken(item, message)
            elif isinstance(item, Change):
                self.clients.change_ended(item, message or "?")
            else:
                self.clients.judge_error(item, code, message)

    # ----------------------------------------------------------------------------------------------------------- the end

    def _goes_away(self, last: int, code: int, reason: bytes) -> None:
        self.ends = True
        if code:
            self._is_blamed = self.clients.was_slow(self)
            if not self._is_blamed:
                self.scheduler.defect(f"{self} is ended with error {code}: {reason.decode()}")
        for call in [call for call in self._calls.values() if call.stream > last]:
            self._forget(call)
            for item in call.open:
                self.clients.not_taken(item, "its call was not looked at")
        waiting, self.waiting = self.waiting, deque()
        for item in waiting:
            self.clients.ask_again(item)

    @property
    def _opens_late(self) -> bool:
        """Returns whether the daemon may have closed it because its preface did not come."""
        came_ns = self._preface_ns or self.scheduler.clock.now_ns
        return not self._is_acknowledged and came_ns - self.opened_ns > _OPENING_NS * 0.9

    def refused_now(self, item: Item) -> str:
        return super().refused_now(item) or ("its preface did not come" if self._opens_late else "")

    def lost(self) -> None:
        for item in list(self.unanswered()):
            if self._is_blamed or self.clients.cut or self.unread:
                self.clients.left(item)
            elif self.refused_now(item):
                self.clients.not_taken(item, "its connection has ended")
            else:
                self.scheduler.defect(f"{self} is closed, and {item} has no answer")
                return
        if self.watched() and not (self.clients.stopped_ns or self._is_blamed or self._opens_late or self.unread):
            self.scheduler.defect(f"{self} is closed while its client watches the daemon's health")


def _request(ask: Ask) -> Any:
    request = grpc_service_pb2.ModelInferRequest(model_name=ask.model, id=str(ask.number))
    for name in inputs_of(ask.model):
        tensor = request.inputs.add(name=name, datatype="INT64", shape=ask.shape)
        if ask.use is not None and (place := ask.use.inputs.get(name)) is not None:
            place.say(tensor.parameters)
        elif ask.number % 3 or ask.size > 1000:
            request.raw_input_contents.append(np.full(ask.size, ask.input, np.int64).tobytes())
        else:
            tensor.contents.int64_contents.extend([ask.input] * ask.size)
    if ask.use is not None and ask.use.outputs:
        for name in ask.outputs:
            output = request.outputs.add(name=name)
            if (place := ask.use.outputs.get(name)) is not None:
                place.say(output.parameters)
    if ask.step is not None:
        request.parameters["sequence_id"].int64_param = ask.step.run.number
        request.parameters["sequence_start"].bool_param = ask.step.start
        request.parameters["sequence_end"].bool_param = ask.step.end
    return request
