/* The one extension module of the worker; _native.h says which file holds what. */

#include "_native.h"

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"MAX_SEQUENCE_ID", MAX_SEQUENCE_ID},
    {"MAX_SET_NAME", MAX_SET_NAME},
    {"MAX_DATAGRAM", TENSORD_MAX_DATAGRAM},
    {"MAX_FDS", MAX_FDS},
    {"TIMING", TENSORD_TIMING},
    {"TIMESTAMPS", TIMESTAMPS},
    {"INLINE_KIND", TENSORD_WHOLE},
    {"MAX_NUMBERS", TENSORD_MAX_NUMBERS},
    {"PAGE_STATE", PAGE_STATE},
    {"PAGE_SINCE", PAGE_SINCE},
    {"PAGE_BEAT", PAGE_BEAT},
    {"SLOT_MODEL", SLOT_MODEL},
    {"SLOT_SINCE", SLOT_SINCE},
    {"MAX_TENSORS", MAX_TENSORS},
    {"MAX_ROWS", MAX_ROWS},
    {"MAX_OFFERS", MAX_OFFERS},
    {"PROTOCOLS", PROTOCOLS},
    {"DURATION_KINDS", DURATION_KINDS},
    {"MAX_BUCKETS", MAX_BUCKETS},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tensord.workers.native._native", "The parts of a worker that are written in C.", -1, output_memory_methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&fast_path_spec);
    int wrong = type == NULL || PyModule_AddFunctions(module, answer_methods) || PyModule_AddObjectRef(module, "FastPath", type) || PyModule_AddStringMacro(module, SOURCES) ||
                PyModule_AddStringMacro(module, MAIN_SET);
    for (size_t i = 0; i < sizeof constants / sizeof *constants && !wrong; i++)
        wrong = PyModule_AddIntConstant(module, constants[i].name, constants[i].value);
    Py_XDECREF(type);
    if (wrong)
        Py_CLEAR(module);
    return module;
}
