/* BYTES tensors: counts, decodes and encodes their elements (tensord.shm.arrays, which has the same in Python).
 *
 *   | length u32 little-endian | length bytes |      elements follow each other without padding
 *
 * Whoever decodes or encodes millions calls it for a few thousand at a time: Python's lock is held meanwhile. Counting lets go of it.
 */

#include "_python.h"

#include <stdint.h>
#include <string.h>

static uint32_t length_at(const unsigned char *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* count(content, most): returns how many complete elements lie at the beginning, at most `most`, and where they end. */
static PyObject *count(PyObject *self, PyObject *arguments)
{
    Py_buffer content;
    Py_ssize_t most, found = 0, at = 0;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*n", &content, &most))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    while (found < most && content.len - at >= 4) {
        Py_ssize_t length = length_at((const unsigned char *)content.buf + at);
        if (length > content.len - at - 4)
            break;
        at += 4 + length;
        found++;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&content);
    return Py_BuildValue("nn", found, at);
}

/* decode(content, at, most): returns a list of the elements from offset `at` on, at most `most`, and where they end. */
static PyObject *decode(PyObject *self, PyObject *arguments)
{
    Py_buffer content;
    Py_ssize_t at, most;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*nn", &content, &at, &most))
        return NULL;
    PyObject *elements = PyList_New(0);
    while (elements != NULL && most-- > 0 && at >= 0 && content.len - at >= 4) {
        Py_ssize_t length = length_at((const unsigned char *)content.buf + at);
        if (length > content.len - at - 4)
            break;
        PyObject *element = PyBytes_FromStringAndSize((const char *)content.buf + at + 4, length);
        if (element == NULL || PyList_Append(elements, element) < 0) {
            Py_CLEAR(elements);
        }
        Py_XDECREF(element);
        at += 4 + length;
    }
    PyBuffer_Release(&content);
    return elements == NULL ? NULL : Py_BuildValue("Nn", elements, at);
}

/* Returns the bytes of an element, bytes or a str as UTF-8; NULL, with an error, of any other. They are its own. */
static const char *text_of(PyObject *element, Py_ssize_t *length)
{
    char *text = NULL;
    if (PyUnicode_Check(element))
        return PyUnicode_AsUTF8AndSize(element, length);
    return PyBytes_AsStringAndSize(element, &text, length) < 0 ? NULL : text;
}

/* encode(elements): returns the bytes of a tensor with these elements, a list of bytes or str. Raises TypeError: one is neither. */
static PyObject *encode(PyObject *self, PyObject *elements)
{
    (void)self;
    Py_ssize_t size = 0, length, number = PyList_Size(elements);
    for (Py_ssize_t i = 0; i < number; i++) {
        if (text_of(PyList_GetItem(elements, i), &length) == NULL)
            return NULL;
        if (length > UINT32_MAX)
            return PyErr_Format(PyExc_OverflowError, "an element has %zd bytes, 4 GiB are too many", length);
        size += 4 + length;
    }
    PyObject *made = number < 0 ? NULL : PyBytes_FromStringAndSize(NULL, size);
    unsigned char *at = made == NULL ? NULL : (unsigned char *)PyBytes_AsString(made);
    for (Py_ssize_t i = 0; at != NULL && i < number; i++) {
        const char *text = text_of(PyList_GetItem(elements, i), &length);
        for (int byte = 0; byte < 4; byte++)
            *at++ = (unsigned char)(length >> 8 * byte);
        memcpy(at, text, length);
        at += length;
    }
    return made;
}

static PyMethodDef methods[] = {
    {"count", count, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {"encode", encode, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_strings", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__strings(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddStringConstant(made, "SOURCES", SOURCES) < 0)
        Py_CLEAR(made);
    return made;
}
