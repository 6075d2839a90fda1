/* A copy that goes past the caches, for tensors that do not fit into them beside what the next computation needs.
 *
 * An ordinary store fetches the line it overwrites, and the lines written push out the input and the output of the executable. A
 * streaming store does neither: of a 16 MiB copy it saves a third of the bytes moved, and the next request finds its input still
 * cached. Elsewhere than on x86-64 the C library's copy is used, which knows its processor as well as we could.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64

static void stream(char *target, const char *source, size_t size) {
#ifdef __SSE2__
    /* Up to the first whole line of the target, which is what streaming stores want; the source may lie anywhere. */
    size_t head = (size_t)(-(uintptr_t)target % LINE);
    head = head < size ? head : size;
    memcpy(target, source, head);
    size_t at = head;
    for (; size - at >= LINE; at += LINE) {
        const __m128i *from = (const __m128i *)(source + at);
        __m128i *to = (__m128i *)(target + at);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    memcpy(target + at, source + at, size - at);
    /* Streaming stores are ordered with nothing: whoever is told of the answer must find them done. */
    _mm_sfence();
#else
    memcpy(target, source, size);
#endif
}

static PyObject *large_copy(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *into, *from;
    Py_buffer target, source;
    if (!PyArg_ParseTuple(arguments, "OO", &into, &from))
        return NULL;
    if (PyObject_GetBuffer(into, &target, PyBUF_WRITABLE) != 0)
        return NULL;
    if (PyObject_GetBuffer(from, &source, PyBUF_SIMPLE) != 0) {
        PyBuffer_Release(&target);
        return NULL;
    }
    Py_ssize_t wanted = target.len, given = source.len;
    if (wanted == given) {
        Py_BEGIN_ALLOW_THREADS
        stream(target.buf, source.buf, (size_t)given);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (wanted != given)
        return PyErr_Format(PyExc_ValueError, "%zd bytes do not fill %zd", given, wanted);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", large_copy, METH_VARARGS, "Copies bytes to a buffer of the same size, past the caches and without the GIL."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tensord.workers.native._large_copy", "Copies past the caches.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__large_copy(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringMacro(module, SOURCES))
        Py_CLEAR(module);
    return module;
}
