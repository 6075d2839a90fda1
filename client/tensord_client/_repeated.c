/* A request that is sent many times: its calls are ordinary exchanges (_exchange.c), without the steps of Python before, as long as what
 * these have found still holds. Between many processes the processor's caches have nothing of an interpreter any more. */

#include "_lane.h"

#include <structmember.h>

/* Seconds from which on a timeout is no limit, as common/call.py says. */
#define FOREVER 1e9

typedef struct {
    PyObject_HEAD
    /* Seconds that a call waits, or None; and (Exchange, sender, call, Placed, own fields, list, its item then, Lock), else Python makes the next call. */
    PyObject *timeout, *found;
} repeated_t;

/* Returns until when a call waits, in monotonic ns; 0: without limit; 1: Python has to say. */
static uint64_t deadline_of(PyObject *timeout, uint64_t now) {
    if (timeout == NULL || timeout == Py_None)
        return 0;
    double seconds = PyFloat_AsDouble(timeout);
    if (PyErr_Occurred())
        return PyErr_Clear(), 1;
    return seconds >= FOREVER ? 0 : seconds > 0 ? now + (uint64_t)(seconds * 1e9) : 1;
}

/* Makes a call. Returns the answer; None: Python has to make it. */
static PyObject *call_at_once(repeated_t *self, PyObject *found, PyObject *timeout) {
    uint64_t now = now_ns(), deadline = deadline_of(timeout == Py_None ? self->timeout : timeout, now);
    exchange_t *exchange = (exchange_t *)PyTuple_GetItem(found, 0);
    lock_t *lock = (lock_t *)PyTuple_GetItem(found, 7);
    if (deadline == 1 || PyList_GetItem(PyTuple_GetItem(found, 5), 0) != PyTuple_GetItem(found, 6) || !take_lock(lock))
        Py_RETURN_NONE;
    PyObject *answer = ask_for(exchange, PyTuple_GetItem(found, 1), PyTuple_GetItem(found, 2), PyTuple_GetItem(found, 3), PyTuple_GetItem(found, 4), now, deadline);
    if (answer == NULL || !is_answer(exchange, answer)) {
        Py_CLEAR(self->found);
        if (answer != NULL && answer != Py_None) {
            PyObject *pending = answer;
            answer = PyObject_CallMethodObjArgs((PyObject *)self, attr.wait_for, pending, NULL);
            Py_DECREF(pending);
        }
    }
    give_lock(lock);
    return answer;
}

static PyObject *call_it(repeated_t *self, PyObject *arguments, PyObject *named) {
    PyObject *found = self->found;
    Py_ssize_t given = PyTuple_Size(arguments);
    if (found != NULL && given <= 1 && named == NULL) {
        Py_INCREF(found);
        PyObject *answer = call_at_once(self, found, given ? PyTuple_GetItem(arguments, 0) : Py_None);
        Py_DECREF(found);
        if (answer != Py_None)
            return answer;
        Py_DECREF(answer);
    }
    PyObject *slowly = PyObject_GetAttr((PyObject *)self, attr.ask_slowly);
    PyObject *answer = slowly == NULL ? NULL : PyObject_Call(slowly, arguments, named);
    Py_XDECREF(slowly);
    return answer;
}

/* Stores what the next calls are made with. */
static PyObject *keep(repeated_t *self, PyObject *found) {
    PyObject *any;
    if (!PyArg_ParseTuple(found, "O!OOO!SO!OO!", exchange_type, &any, &any, &any, placed_type, &any, &any, &PyList_Type, &any, &any, lock_type, &any))
        return NULL;
    Py_INCREF(found);
    Py_XDECREF(self->found);
    self->found = found;
    Py_RETURN_NONE;
}

static int traverse(repeated_t *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->timeout);
    Py_VISIT(self->found);
    return 0;
}

static int clear(repeated_t *self) {
    Py_CLEAR(self->timeout);
    Py_CLEAR(self->found);
    return 0;
}

static void drop(repeated_t *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* It is described in _lane.pyi. */
static PyMethodDef methods[] = {{"keep", (PyCFunction)(void (*)(void))keep, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static PyMemberDef members[] = {{"timeout", T_OBJECT, offsetof(repeated_t, timeout), 0, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, drop}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods},     {Py_tp_members, members}, {Py_tp_call, call_it},       {0, NULL},
};

PyType_Spec repeated_spec = {"tensord_client._lane.Repeated", sizeof(repeated_t), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};
