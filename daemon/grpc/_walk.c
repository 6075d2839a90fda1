/* One walk over a ModelInferRequest: what is its own, its id, scheduling and raw tensors, and the rest, by which its form is found.
 *
 *     | model_name | id | parameters: priority | inputs | outputs | ... | raw_input_contents | raw_input_contents |
 *           rest    own            own            rest     rest                 own                  own
 *
 * daemon/grpc/walk.py says in words what is found. Only what clients write is taken: fields of the message whose tag is one byte.
 * Everything else, malformed or merely unusual, is None, and the exact reader's.
 * Nothing is read outside of the given bytes.
 */

#include "../../shm/_python.h"

#include <stdint.h>
#include <string.h>

#define ID 0x1A
#define PARAMETER 0x22
#define RAW 0x3A
/* Longer rests hold data, or are rare; more raw tensors than that have few models. */
#define MAX_REST 2048
#define MAX_SCHEDULING 512
#define MAX_RAWS 256
/* A field is shorter than a message, which is below 2^32. */
#define MAX_LENGTH_BYTES 5
#define ALIGNMENT 64
#define MAX_KNOWN 32
#define MAX_KEY 64

struct own {
    /* 1 if the walk ends where the first raw tensor's bytes begin, which need not be there. */
    int stops;
    Py_ssize_t id, id_size;
    Py_ssize_t rest_size, scheduling_size;
    Py_ssize_t raws;
    Py_ssize_t at[MAX_RAWS], size[MAX_RAWS];
    unsigned char rest[MAX_REST], scheduling[MAX_SCHEDULING];
};

/* How entries of parameters that schedule begin (``know``). */
static unsigned char known[MAX_KNOWN][MAX_KEY];
static Py_ssize_t known_sizes[MAX_KNOWN], known_count;

static int is_known(unsigned char tag) {
    switch (tag) {
    case 0x0A: case 0x12: case ID: case 0x22: case 0x2A: case 0x32: case RAW:
        return 1;
    default:
        return 0;
    }
}

/* Returns whether a parameter says how the request is scheduled: its entry begins with its key, as clients write it. */
static int is_scheduling(const unsigned char *entry, Py_ssize_t size) {
    for (Py_ssize_t i = 0; i < known_count; i++)
        if (known_sizes[i] <= size && memcmp(known[i], entry, (size_t)known_sizes[i]) == 0)
            return 1;
    return 0;
}

/* Appends what is at most ``most`` bytes then. */
static int keep(unsigned char *kept, Py_ssize_t *kept_size, Py_ssize_t most, const unsigned char *field, Py_ssize_t size) {
    if (size > most - *kept_size)
        return 0;
    memcpy(kept + *kept_size, field, (size_t)size);
    *kept_size += size;
    return 1;
}

/* Returns whether it is such a message; positions are from its start. */
static int find(const unsigned char *message, Py_ssize_t end, struct own *own) {
    Py_ssize_t at = 0;
    while (at < end) {
        Py_ssize_t start = at;
        unsigned char tag = message[at++];
        if (!is_known(tag))
            return 0;
        uint64_t size = 0;
        int shift = 0;
        for (;;) {
            if (at == end || shift == 7 * MAX_LENGTH_BYTES)
                return 0;
            unsigned char byte = message[at++];
            size |= (uint64_t)(byte & 127) << shift;
            if (byte < 128)
                break;
            shift += 7;
        }
        if (tag == RAW && own->stops) {
            own->at[0] = at;
            own->size[0] = (Py_ssize_t)size;
            own->raws = 1;
            return 1;
        }
        if (size > (uint64_t)(end - at))
            return 0;
        Py_ssize_t next = at + (Py_ssize_t)size;
        if (tag == RAW) {
            if (own->raws == MAX_RAWS)
                return 0;
            own->at[own->raws] = at;
            own->size[own->raws++] = (Py_ssize_t)size;
        } else if (tag == ID) {
            own->id = at;
            own->id_size = (Py_ssize_t)size;
        } else if (tag == PARAMETER && !own->stops && is_scheduling(message + at, next - at)) {
            if (!keep(own->scheduling, &own->scheduling_size, MAX_SCHEDULING, message + start, next - start))
                return 0;
        } else if (!keep(own->rest, &own->rest_size, MAX_REST, message + start, next - start)) {
            return 0;
        }
        at = next;
    }
    return !own->stops;
}

/* content[at : at + size], without a copy. */
static PyObject *view_of(PyObject *content, Py_ssize_t at, Py_ssize_t size) {
    PyObject *whole = PyMemoryView_FromObject(content);
    if (whole == NULL)
        return NULL;
    PyObject *view = PySequence_GetSlice(whole, at, at + size);
    Py_DECREF(whole);
    return view;
}

static PyObject *tensors(PyObject *content, const char *message, Py_ssize_t start, const struct own *own,
                         Py_ssize_t inline_size, Py_ssize_t *lent) {
    PyObject *raws = PyTuple_New(own->raws);
    if (raws == NULL)
        return NULL;
    for (Py_ssize_t number = 0; number < own->raws; number++) {
        Py_ssize_t at = own->at[number], size = own->size[number];
        PyObject *raw;
        if (size <= inline_size) {
            inline_size -= size;
            raw = PyBytes_FromStringAndSize(message + at, size);
        } else {
            raw = view_of(content, start + at, size);
            *lent += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        }
        if (raw == NULL || PyTuple_SetItem(raws, number, raw) != 0) {
            Py_DECREF(raws);
            return NULL;
        }
    }
    return raws;
}

static PyObject *found(PyObject *content, const char *message, Py_ssize_t start, const struct own *own,
                       Py_ssize_t inline_size) {
    Py_ssize_t lent = 0;
    PyObject *raws = tensors(content, message, start, own, inline_size, &lent);
    if (raws == NULL)
        return NULL;
    return Py_BuildValue("NNNNn", PyBytes_FromStringAndSize((const char *)own->rest, own->rest_size),
                         PyBytes_FromStringAndSize(message + own->id, own->id_size),
                         PyBytes_FromStringAndSize((const char *)own->scheduling, own->scheduling_size), raws, lent);
}

static PyObject *begun(const char *message, const struct own *own) {
    return Py_BuildValue("NNnn", PyBytes_FromStringAndSize((const char *)own->rest, own->rest_size),
                         PyBytes_FromStringAndSize(message + own->id, own->id_size), own->at[0], own->size[0]);
}

/* Both walks: with a fourth argument a whole message, without it one of which the beginning is there. */
static PyObject *walk_over(PyObject *const *arguments, Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted)
        return PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are taken", count, wanted);
    Py_ssize_t start = PyLong_AsSsize_t(arguments[1]), end = PyLong_AsSsize_t(arguments[2]);
    Py_ssize_t inline_size = count == 4 ? PyLong_AsSsize_t(arguments[3]) : 0;
    if (PyErr_Occurred())
        return NULL;
    Py_buffer buffer;
    if (PyObject_GetBuffer(arguments[0], &buffer, PyBUF_SIMPLE) != 0)
        return NULL;
    PyObject *result = NULL;
    if (start < 0 || end < start || end > buffer.len) {
        PyErr_Format(PyExc_ValueError, "%zd to %zd is not within %zd bytes", start, end, buffer.len);
    } else {
        const char *message = (const char *)buffer.buf + start;
        struct own own;
        own.stops = count == 3;
        own.id = own.id_size = own.rest_size = own.scheduling_size = own.raws = 0;
        if (find((const unsigned char *)message, end - start, &own)) {
            result = own.stops ? begun(message, &own) : found(arguments[0], message, start, &own, inline_size);
        } else {
            result = Py_None;
            Py_INCREF(result);
        }
    }
    PyBuffer_Release(&buffer);
    return result;
}

static PyObject *walk(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return walk_over(arguments, count, 4);
}

static PyObject *walk_beginning(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return walk_over(arguments, count, 3);
}

static PyObject *know(PyObject *module, PyObject *beginnings) {
    (void)module;
    Py_ssize_t count = PyTuple_Size(beginnings);
    if (count < 0 || count > MAX_KNOWN)
        return PyErr_Format(PyExc_ValueError, "a tuple of at most %d names is taken", MAX_KNOWN);
    known_count = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        char *beginning;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(beginnings, i), &beginning, &known_sizes[i]) != 0)
            return NULL;
        if (known_sizes[i] > MAX_KEY)
            return PyErr_Format(PyExc_ValueError, "a name has %zd bytes, at most %d are taken", known_sizes[i], MAX_KEY);
        memcpy(known[i], beginning, (size_t)known_sizes[i]);
    }
    known_count = count;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"know", know, METH_O, "Sets how the entries of parameters that schedule begin, for all later walks."},
    {"walk_beginning", (PyCFunction)(void (*)(void))walk_beginning, METH_FASTCALL, "See daemon/grpc/walk.py."},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, "See daemon/grpc/walk.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tensord.daemon.grpc._walk", "Walks over messages.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__walk(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringMacro(module, SOURCES))
        Py_CLEAR(module);
    return module;
}
