"""The messages of grpc/reflection/v1/reflection.proto. Written by `make protocol`: change the .proto file, not this one."""

from tensord.protocol import pool

pool.define(
    b'\n#grpc/reflection/v1/reflection.proto\x12\x12grpc.reflection.v1"\x85\x02\n\x17ServerReflectionRequest\x12'
    b'\x0c\n\x04host\x18\x01 \x01(\t\x12\x1a\n\x10file_by_filename\x18\x03 \x01(\tH\x00\x12 \n\x16file_containing_s'
    b'ymbol\x18\x04 \x01(\tH\x00\x12I\n\x19file_containing_extension\x18\x05 \x01(\x0b2$.grpc.reflection.v1.Extensi'
    b"onRequestH\x00\x12'\n\x1dall_extension_numbers_of_type\x18\x06 \x01(\tH\x00\x12\x17\n\rlist_services\x18\x07 "
    b'\x01(\tH\x00B\x11\n\x0fmessage_request"E\n\x10ExtensionRequest\x12\x17\n\x0fcontaining_type\x18\x01 \x01(\t'
    b'\x12\x18\n\x10extension_number\x18\x02 \x01(\x05"\xb8\x03\n\x18ServerReflectionResponse\x12\x12\n\nvalid_host'
    b'\x18\x01 \x01(\t\x12E\n\x10original_request\x18\x02 \x01(\x0b2+.grpc.reflection.v1.ServerReflectionRequest'
    b'\x12N\n\x18file_descriptor_response\x18\x04 \x01(\x0b2*.grpc.reflection.v1.FileDescriptorResponseH\x00\x12U\n'
    b'\x1eall_extension_numbers_response\x18\x05 \x01(\x0b2+.grpc.reflection.v1.ExtensionNumberResponseH\x00\x12I\n'
    b"\x16list_services_response\x18\x06 \x01(\x0b2'.grpc.reflection.v1.ListServiceResponseH\x00\x12;\n\x0eerror_re"
    b'sponse\x18\x07 \x01(\x0b2!.grpc.reflection.v1.ErrorResponseH\x00B\x12\n\x10message_response"7\n\x16FileDescri'
    b'ptorResponse\x12\x1d\n\x15file_descriptor_proto\x18\x01 \x03(\x0c"K\n\x17ExtensionNumberResponse\x12\x16\n'
    b'\x0ebase_type_name\x18\x01 \x01(\t\x12\x18\n\x10extension_number\x18\x02 \x03(\x05"K\n\x13ListServiceResponse'
    b'\x124\n\x07service\x18\x01 \x03(\x0b2#.grpc.reflection.v1.ServiceResponse"\x1f\n\x0fServiceResponse\x12\x0c\n'
    b'\x04name\x18\x01 \x01(\t":\n\rErrorResponse\x12\x12\n\nerror_code\x18\x01 \x01(\x05\x12\x15\n\rerror_message'
    b'\x18\x02 \x01(\t2\x89\x01\n\x10ServerReflection\x12u\n\x14ServerReflectionInfo\x12+.grpc.reflection.v1.Server'
    b'ReflectionRequest\x1a,.grpc.reflection.v1.ServerReflectionResponse(\x010\x01b\x06proto3',
    globals(),
)
