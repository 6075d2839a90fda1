/* Records in C: a datagram's are decoded, a request's is encoded, and an answer's arrays are made. Each function does what one of Python
 * does (msgpack.unpack_from, wire.request, placement.small_inputs, pending.arrays), which is called where this is not built.
 *
 * It is optional, and decides nothing that Python does not: what is not as usual is left to Python.
 */

#include "_records.h"

#include <stdint.h>
#include <string.h>

/* Arrays and maps in one another; records have fewer. */
#define MAX_DEPTH 16

typedef struct {
    const unsigned char *at, *end;
} reader_t;

/* Reads a number of that many bytes. Returns 0, or -1: it is cut off. */
static int read_number(reader_t *reader, int width, uint64_t *number) {
    if (reader->end - reader->at < width)
        return -1;
    *number = 0;
    for (int i = 0; i < width; i++)
        *number = *number << 8 | *reader->at++;
    return 0;
}

/* Returns the next so many bytes, or NULL: they are cut off. */
static const char *read_part(reader_t *reader, uint64_t size) {
    if (size > (uint64_t)(reader->end - reader->at))
        return NULL;
    const char *part = (const char *)reader->at;
    reader->at += size;
    return part;
}

static PyObject *read_value(reader_t *reader, int depth);

static PyObject *read_text(reader_t *reader, uint64_t size) {
    const char *part = read_part(reader, size);
    return part == NULL ? NULL : PyUnicode_DecodeUTF8(part, (Py_ssize_t)size, NULL);
}

static PyObject *read_bytes(reader_t *reader, uint64_t size) {
    const char *part = read_part(reader, size);
    return part == NULL ? NULL : PyBytes_FromStringAndSize(part, (Py_ssize_t)size);
}

static PyObject *read_array(reader_t *reader, uint64_t count, int depth) {
    /* Each element has a byte at least. */
    if (depth == 0 || count > (uint64_t)(reader->end - reader->at))
        return NULL;
    PyObject *made = PyList_New((Py_ssize_t)count);
    for (uint64_t i = 0; made != NULL && i < count; i++) {
        PyObject *value = read_value(reader, depth - 1);
        if (value == NULL || PyList_SetItem(made, (Py_ssize_t)i, value))
            Py_CLEAR(made);
    }
    return made;
}

static PyObject *read_map(reader_t *reader, uint64_t count, int depth) {
    if (depth == 0 || count > (uint64_t)(reader->end - reader->at))
        return NULL;
    PyObject *made = PyDict_New();
    for (uint64_t i = 0; made != NULL && i < count; i++) {
        PyObject *key = read_value(reader, depth - 1);
        PyObject *value = key == NULL ? NULL : read_value(reader, depth - 1);
        if (value == NULL || PyDict_SetItem(made, key, value))
            Py_CLEAR(made);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return made;
}

static PyObject *read_float(reader_t *reader, int width) {
    uint64_t bits;
    if (read_number(reader, width, &bits))
        return NULL;
    if (width == 8) {
        double number;
        memcpy(&number, &bits, sizeof number);
        return PyFloat_FromDouble(number);
    }
    uint32_t half = (uint32_t)bits;
    float number;
    memcpy(&number, &half, sizeof number);
    return PyFloat_FromDouble((double)number);
}

static PyObject *read_signed(reader_t *reader, int width) {
    uint64_t bits;
    if (read_number(reader, width, &bits))
        return NULL;
    int unused = 64 - 8 * width;
    return PyLong_FromLongLong((int64_t)(bits << unused) >> unused);
}

static PyObject *constant(PyObject *value) {
    Py_INCREF(value);
    return value;
}

/* Returns a value, or NULL, perhaps with an exception: Python's decoder judges it. */
static PyObject *read_value(reader_t *reader, int depth) {
    uint64_t number;
    if (reader->at == reader->end)
        return NULL;
    unsigned char head = *reader->at++;
    if (head < 0x80)
        return PyLong_FromLong(head);
    if (head >= 0xE0)
        return PyLong_FromLong((long)head - 0x100);
    if (head < 0x90)
        return read_map(reader, head & 0x0F, depth);
    if (head < 0xA0)
        return read_array(reader, head & 0x0F, depth);
    if (head < 0xC0)
        return read_text(reader, head & 0x1F);
    switch (head) {
    case 0xC0:
        return constant(Py_None);
    case 0xC2:
        return constant(Py_False);
    case 0xC3:
        return constant(Py_True);
    case 0xC4:
    case 0xC5:
    case 0xC6:
        return read_number(reader, 1 << (head - 0xC4), &number) ? NULL : read_bytes(reader, number);
    case 0xCA:
        return read_float(reader, 4);
    case 0xCB:
        return read_float(reader, 8);
    case 0xCC:
    case 0xCD:
    case 0xCE:
    case 0xCF:
        return read_number(reader, 1 << (head - 0xCC), &number) ? NULL : PyLong_FromUnsignedLongLong(number);
    case 0xD0:
    case 0xD1:
    case 0xD2:
    case 0xD3:
        return read_signed(reader, 1 << (head - 0xD0));
    case 0xD9:
    case 0xDA:
    case 0xDB:
        return read_number(reader, 1 << (head - 0xD9), &number) ? NULL : read_text(reader, number);
    case 0xDC:
    case 0xDD:
        return read_number(reader, 2 << (head - 0xDC), &number) ? NULL : read_array(reader, number, depth);
    case 0xDE:
    case 0xDF:
        return read_number(reader, 2 << (head - 0xDE), &number) ? NULL : read_map(reader, number, depth);
    default:
        return NULL;
    }
}

PyDoc_STRVAR(unpack_text, "unpack_from(content, at, end)\n--\n\n"
                          "Decodes a value of a bytes or bytearray. Returns it and where the next begins; None: Python is to judge it.");

static PyObject *unpack_from(PyObject *module, PyObject *arguments) {
    PyObject *content;
    Py_ssize_t at, end;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Onn", &content, &at, &end))
        return NULL;
    int is_bytes = PyBytes_Check(content);
    if (!is_bytes && !PyByteArray_Check(content))
        Py_RETURN_NONE;
    const char *memory = is_bytes ? PyBytes_AsString(content) : PyByteArray_AsString(content);
    Py_ssize_t size = is_bytes ? PyBytes_Size(content) : PyByteArray_Size(content);
    if (at < 0 || end < at || end > size)
        Py_RETURN_NONE;
    reader_t reader = {(const unsigned char *)memory + at, (const unsigned char *)memory + end};
    PyObject *value = read_value(&reader, MAX_DEPTH);
    if (value == NULL) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return Py_BuildValue("Nn", value, (Py_ssize_t)((const char *)reader.at - memory));
}

/* ----------------------------------------------------------------------------------------------------------------- requests */

/* Names of attributes, and of what numpy has. */
static PyObject *base_name, *dtype_name, *nbytes_name, *shape_name, *tobytes_name;

/* What a request's record begins with, up to its id. */
#define REQUEST_HEAD "\xdc\x00\x10\xa1q\xcf"
#define HEAD_SIZE (sizeof REQUEST_HEAD - 1)
#define ID_SIZE 8
/* The heads of an array and of a byte string have at most so many bytes. */
#define MOST_HEAD 5

/* Writes a big-endian number of that many bytes. Returns where the next begins. */
static char *write_number(char *at, uint64_t number, int width) {
    for (int i = width - 1; i >= 0; i--, number >>= 8)
        at[i] = (char)(number & 0xff);
    return at + width;
}

static char *write_bytes(char *at, const char *content, Py_ssize_t size) {
    memcpy(at, content, (size_t)size);
    return at + size;
}

static char *write_array_head(char *at, uint64_t count) {
    if (count < 0x10) {
        *at++ = (char)(0x90 | count);
        return at;
    }
    *at++ = (char)(count < 0x10000 ? 0xDC : 0xDD);
    return write_number(at, count, count < 0x10000 ? 2 : 4);
}

static char *write_binary_head(char *at, uint64_t size) {
    int power = size < 0x100 ? 0 : size < 0x10000 ? 1 : 2;
    *at++ = (char)(0xC4 + power);
    return write_number(at, size, 1 << power);
}

PyDoc_STRVAR(request_text, "request(request_id, prepared, contents, own)\n--\n\nAs ``wire.request``; ``contents`` is a list of bytes.");

static PyObject *request(PyObject *module, PyObject *arguments) {
    unsigned long long id;
    char *prepared, *own, *content;
    Py_ssize_t prepared_size, own_size, size;
    PyObject *given, *contents, *fields;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KSO!S", &id, &given, &PyList_Type, &contents, &fields) ||
        PyBytes_AsStringAndSize(given, &prepared, &prepared_size) || PyBytes_AsStringAndSize(fields, &own, &own_size))
        return NULL;
    Py_ssize_t count = PyList_Size(contents), room = HEAD_SIZE + ID_SIZE + prepared_size + MOST_HEAD + own_size;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyBytes_AsStringAndSize(PyList_GetItem(contents, i), &content, &size))
            return NULL;
        room += MOST_HEAD + size;
    }
    char stack[1024], *made = room <= (Py_ssize_t)sizeof stack ? stack : (char *)PyMem_Malloc((size_t)room);
    if (made == NULL)
        return PyErr_NoMemory();
    char *at = write_bytes(made, REQUEST_HEAD, HEAD_SIZE);
    at = write_number(at, id, ID_SIZE);
    at = write_bytes(at, prepared, prepared_size);
    at = write_array_head(at, (uint64_t)count);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *each = PyList_GetItem(contents, i);
        size = PyBytes_Size(each);
        at = write_binary_head(at, (uint64_t)size);
        at = write_bytes(at, PyBytes_AsString(each), size);
    }
    at = write_bytes(at, own, own_size);
    PyObject *record = PyBytes_FromStringAndSize(made, at - made);
    if (made != stack)
        PyMem_Free(made);
    return record;
}

/* Returns whether an array is no view, or one of an array that is none; -1 with an exception. */
static int is_its_own(PyObject *array, PyObject *ndarray) {
    PyObject *base = PyObject_GetAttr(array, base_name), *beneath;
    int is = base == NULL ? -1 : base == Py_None;
    if (is == 0 && (PyObject *)Py_TYPE(base) == ndarray) {
        beneath = PyObject_GetAttr(base, base_name);
        is = beneath == NULL ? -1 : beneath == Py_None;
        Py_XDECREF(beneath);
    }
    Py_XDECREF(base);
    return is;
}

/* Appends an attribute of an object to a list. Not 0: there is an exception. */
static int append_attribute(PyObject *list, PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    int wrong = value == NULL || PyList_Append(list, value);
    Py_XDECREF(value);
    return wrong;
}

/* Appends what is said of an input to its request's kind, and its bytes to the contents. Returns whether it travels inside; -1 with an
 * exception. */
static int put_input(PyObject *name, PyObject *array, PyObject *ndarray, Py_ssize_t limit, Py_ssize_t *room, PyObject *kind, PyObject *contents) {
    if ((PyObject *)Py_TYPE(array) != ndarray)
        return 0;
    PyObject *number = PyObject_GetAttr(array, nbytes_name);
    Py_ssize_t size = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    if (size < 0)
        return -1;
    if (size > limit || size > *room)
        return 0;
    *room -= size;
    int is = is_its_own(array, ndarray);
    if (is <= 0)
        return is;
    if (PyList_Append(kind, name) || append_attribute(kind, array, dtype_name) || append_attribute(kind, array, shape_name))
        return -1;
    PyObject *content = PyObject_CallMethodObjArgs(array, tobytes_name, NULL);
    int wrong = content == NULL || PyList_Append(contents, content);
    Py_XDECREF(content);
    return wrong ? -1 : 1;
}

PyDoc_STRVAR(small_text, "small_inputs(inputs, limit, room, ndarray)\n--\n\nAs ``placement.small_inputs``, for a dict; ``ndarray`` is numpy's.");

static PyObject *small_inputs(PyObject *module, PyObject *arguments) {
    PyObject *inputs, *ndarray, *name, *array, *answer = NULL;
    Py_ssize_t limit, room, at = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!nnO", &PyDict_Type, &inputs, &limit, &room, &ndarray))
        return NULL;
    PyObject *kind = PyList_New(0), *contents = PyList_New(0);
    int is = kind == NULL || contents == NULL ? -1 : 1;
    /* What numpy does may change a dict that another thread has: each is held while it is looked at. */
    while (is > 0 && PyDict_Next(inputs, &at, &name, &array)) {
        Py_INCREF(name);
        Py_INCREF(array);
        is = put_input(name, array, ndarray, limit, &room, kind, contents);
        Py_DECREF(name);
        Py_DECREF(array);
    }
    PyObject *fixed = is > 0 ? PyList_AsTuple(kind) : NULL;
    if (fixed != NULL)
        answer = PyTuple_Pack(2, fixed, contents);
    Py_XDECREF(fixed);
    Py_XDECREF(kind);
    Py_XDECREF(contents);
    if (is == 0)
        Py_RETURN_NONE;
    return answer;
}

/* ------------------------------------------------------------------------------------------------------------------ answers */

PyDoc_STRVAR(arrays_text, "arrays(answer, outputs, contents, ndarray)\n--\n\nAs ``pending.arrays``; ``ndarray`` is numpy's.");

static PyObject *arrays(PyObject *module, PyObject *arguments) {
    PyObject *answer, *outputs, *contents, *ndarray, *name, *shape, *dtype;
    Py_ssize_t byte_size, size;
    char *content;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O", &PyDict_Type, &answer, &PyTuple_Type, &outputs, &PyList_Type, &contents, &ndarray))
        return NULL;
    Py_ssize_t count = PyTuple_Size(outputs);
    if (PyList_Size(contents) != count)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *each = PyList_GetItem(contents, i);
        if (!PyArg_ParseTuple(PyTuple_GetItem(outputs, i), "OOOn", &name, &shape, &dtype, &byte_size))
            return NULL;
        if (!PyBytes_CheckExact(each) || PyBytes_Size(each) != byte_size)
            Py_RETURN_FALSE;
        if (PyBytes_AsStringAndSize(each, &content, &size))
            return NULL;
        PyObject *memory = PyByteArray_FromStringAndSize(content, size);
        PyObject *array = memory == NULL ? NULL : PyObject_CallFunctionObjArgs(ndarray, shape, dtype, memory, NULL);
        int wrong = array == NULL || PyDict_SetItem(answer, name, array);
        Py_XDECREF(memory);
        Py_XDECREF(array);
        if (wrong)
            return NULL;
    }
    Py_RETURN_TRUE;
}

PyMethodDef record_functions[] = {
    {"unpack_from", unpack_from, METH_VARARGS, unpack_text},
    {"request", request, METH_VARARGS, request_text},
    {"small_inputs", small_inputs, METH_VARARGS, small_text},
    {"arrays", arrays, METH_VARARGS, arrays_text},
    {NULL, NULL, 0, NULL},
};

int record_names(void) {
    base_name = PyUnicode_InternFromString("base");
    dtype_name = PyUnicode_InternFromString("dtype");
    nbytes_name = PyUnicode_InternFromString("nbytes");
    shape_name = PyUnicode_InternFromString("shape");
    tobytes_name = PyUnicode_InternFromString("tobytes");
    return base_name == NULL || dtype_name == NULL || nbytes_name == NULL || shape_name == NULL || tobytes_name == NULL;
}
