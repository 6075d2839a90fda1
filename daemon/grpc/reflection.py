"""Answers the requests of gRPC server reflection from the descriptors of tensord's messages. Sans-I/O.

Source: grpc/reflection/v1/reflection.proto. None of tensord's messages has an extension, so a request for an extension by its
number never finds any.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FileDescriptor

from tensord.daemon.grpc.codes import INVALID_ARGUMENT, NOT_FOUND
from tensord.protocol.pool import POOL


class Reflection:
    """Answers the requests of one version (v1, v1alpha) of server reflection.

    ``messages``: the module of that version's messages. ``services``: names of the services that the server has.
    """

    def __init__(self, messages: Any, services: tuple[str, ...]) -> None:
        self._messages = messages
        self._services = sorted(services)

    def answer(self, question: Any) -> Any:
        """Returns the ServerReflectionResponse to a ServerReflectionRequest; an unknown file or symbol makes it an error."""
        answer = self._messages.ServerReflectionResponse(valid_host=question.host, original_request=question)
        kind = question.WhichOneof("message_request")
        error = answer.error_response
        if kind is None:
            error.error_code, error.error_message = INVALID_ARGUMENT, "the request asks for nothing"
            return answer
        asked = getattr(question, kind)
        try:
            self._fill(answer, kind, asked)
        except KeyError:
            if kind == "file_containing_extension":
                asked = f"{asked.containing_type}, extension {asked.extension_number}"
            error.error_code, error.error_message = NOT_FOUND, f"{kind.replace('_', ' ')}: '{asked}' is not found"
        return answer

    def _fill(self, answer: Any, kind: str, asked: Any) -> None:
        """Fills in the answer to one request: ``kind`` names the request's field that is set, and ``asked`` is its value.

        Raises KeyError: no such file, symbol or extension.
        """
        if kind == "file_by_filename":
            _describe(answer, POOL.FindFileByName(asked))
        elif kind == "file_containing_symbol":
            _describe(answer, _file_of(asked))
        elif kind == "file_containing_extension":
            POOL.FindExtensionByNumber(POOL.FindMessageTypeByName(asked.containing_type), asked.extension_number)
        elif kind == "all_extension_numbers_of_type":
            answer.all_extension_numbers_response.base_type_name = POOL.FindMessageTypeByName(asked).full_name
        else:
            for service in self._services:
                answer.list_services_response.service.add(name=service)


def _file_of(symbol: str) -> FileDescriptor:
    """Returns the file that defines a symbol, which may be a method. Raises KeyError: no file defines it."""
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        # Not every protobuf looks for methods there.
        return POOL.FindMethodByName(symbol).containing_service.file


def _describe(answer: Any, file: FileDescriptor) -> None:
    """Adds the descriptor of a file to an answer, followed by those of all files that it imports."""
    found = [file]
    for each in found:
        found += [imported for imported in each.dependencies if imported not in found]
    answer.file_descriptor_response.file_descriptor_proto.extend(each.serialized_pb for each in found)
