"""Checks an answer of a server against the right answer: everything in it is compared.

    model, id, and of each output name, datatype, shape and every value        no output more, none less

HTTP answers may be compressed where the request allows it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping

import hpack
import numpy as np
from tritonclient.grpc import service_pb2

from bench.vary.pools import Asked

_PREFIX_SIZE = 5


class WrongAnswer(AssertionError):
    """An answer is not the right one."""


def check(protocol: str, asked: Asked, answer: bytes) -> None:
    """Raises WrongAnswer: the answer is not the right one.

    ``answer``: over HTTP with its head, over gRPC with the five bytes before the message.
    """
    try:
        if protocol == "http":
            model, id, outputs = _http(answer)
        else:
            model, id, outputs = _grpc(answer, protocol == "stream")
    except (ValueError, KeyError, zlib.error) as error:
        raise WrongAnswer(f"unreadable answer ({error!r}): {answer[:300]!r}") from None
    if (model, id) != (asked.model, asked.id):
        raise WrongAnswer(f"model '{model}' answers with id '{id}': '{asked.model}' was asked with '{asked.id}'")
    if outputs.keys() != asked.outputs.keys():
        raise WrongAnswer(f"outputs {', '.join(outputs)}: {', '.join(asked.outputs)} were asked for")
    for name, right in asked.outputs.items():
        values = outputs[name]
        absolute, relative = asked.rounded
        if values.shape != right.shape or not np.allclose(values, right, relative, absolute):
            raise WrongAnswer(f"output '{name}' of '{model}' is {values}, right is {right}")


def check_blocks(blocks: Iterable[bytes]) -> None:
    """Raises WrongAnswer: a call did not end with OK.

    ``blocks``: header blocks that do not use the HPACK table, each after a byte that is not 0 where the block is one of trailers.
    """
    for block in blocks:
        decoder = hpack.Decoder()
        fields = dict(decoder.decode(block[1:]))
        status = fields.get("grpc-status", "none" if block[0] else "0")
        if status != "0" or fields.get(":status", "200") != "200":
            raise WrongAnswer(f"a call ended with {fields}")


def _http(answer: bytes) -> tuple[str, str, Mapping[str, np.ndarray]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    if status.split()[1] != "200":
        raise WrongAnswer(f"{status}: {body[:300]!r}")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if fields.get("content-encoding", "identity") != "identity":
        body = zlib.decompress(body, zlib.MAX_WBITS | 32)
    json_size = int(fields["inference-header-content-length"])
    said, tensors = json.loads(body[:json_size]), body[json_size:]
    outputs = {}
    for output in said["outputs"]:
        size = output["parameters"]["binary_data_size"]
        outputs[output["name"]] = _values(output["datatype"], output["shape"], tensors[:size])
        tensors = tensors[size:]
    if tensors or said["model_version"] != "1":
        raise WrongAnswer(f"{len(tensors)} bytes behind the answer of version {said['model_version']}")
    return said["model_name"], said.get("id", ""), outputs


def _grpc(answer: bytes, streamed: bool) -> tuple[str, str, Mapping[str, np.ndarray]]:
    if not answer:
        raise WrongAnswer("a call ended without an answer")
    message = answer[_PREFIX_SIZE:]
    if streamed:
        of_stream = service_pb2.ModelStreamInferResponse.FromString(message)
        if of_stream.error_message:
            raise WrongAnswer(of_stream.error_message)
        said = of_stream.infer_response
    else:
        said = service_pb2.ModelInferResponse.FromString(message)
    outputs = {
        output.name: _values(output.datatype, output.shape, content)
        for output, content in zip(said.outputs, said.raw_output_contents, strict=True)
    }
    if said.model_version != "1":
        raise WrongAnswer(f"version '{said.model_version}' answers")
    return said.model_name, said.id, outputs


def _values(datatype: str, shape: Iterable[int], content: bytes) -> np.ndarray:
    if datatype != "FP32":
        raise WrongAnswer(f"an output of {datatype}: FP32 is right")
    return np.frombuffer(content, np.float32).reshape(tuple(shape))
