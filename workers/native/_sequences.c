/* Asks Python's planner, once for each run, which requests of sequences run now, and lets Python answer those whose run failed.
 *
 *     [(correlation id, START, END), ...] ─▶ batch->choose (workers/dispatch/sequence_runs.py) ─▶ how many run now, from the first one on
 *                                            ╰─▶ gathered, run, answered ─▶ self->left, when the answers have left
 *     it failed: [(lane, request id, arrived), ...], error ─▶ batch->fail
 *
 * No request of a sequence is run twice: one that was chosen is answered here or by ``fail``.
 */

#include "_native.h"

/* Returns the id of a request's sequence: an int or a str. */
static PyObject *correlation_id(const request_t *request) {
    const tensord__text *text = &request->sequence_text;
    return text->at == NULL ? PyLong_FromUnsignedLongLong(request->sequence_id) : PyUnicode_DecodeUTF8(text->at, (Py_ssize_t)text->size, NULL);
}

/* Returns what ``choose`` is asked: (correlation id, START, END) of each request. */
static PyObject *asked(const request_t *requests, int count) {
    PyObject *found = PyList_New(0);
    for (int n = 0; found != NULL && n < count; n++)
        if (append(found, Py_BuildValue("(NOO)", correlation_id(&requests[n]), requests[n].start ? Py_True : Py_False,
                                        requests[n].end ? Py_True : Py_False)))
            Py_CLEAR(found);
    return found;
}

/* Returns the descriptors of the clients' lanes that the requests came on, -1 for a front's; or None: all are fronts'. */
static PyObject *clients_of(const request_t *requests, int count) {
    int n = 0;
    while (n < count && !requests[n].lane->most)
        n++;
    if (n == count) {
        Py_INCREF(Py_None);
        return Py_None;
    }
    PyObject *found = PyList_New(0);
    for (n = 0; found != NULL && n < count; n++)
        if (append(found, PyLong_FromLong(requests[n].lane->most ? requests[n].lane->fd : -1)))
            Py_CLEAR(found);
    return found;
}

/* Returns how many of the first of these requests run now; 0: they are for Python; -1: an exception is set that ends the process. */
int choose_requests(const request_t *requests, int count) {
    const batch_t *batch = requests->plan->batch;
    PyObject *list = asked(requests, count);
    PyObject *clients = list == NULL ? NULL : clients_of(requests, count);
    PyObject *given = clients == NULL ? NULL : PyObject_CallFunctionObjArgs(batch->choose, list, clients == Py_None ? NULL : clients, NULL);
    long chosen = given == NULL ? 0 : PyLong_AsLong(given);
    Py_XDECREF(given);
    Py_XDECREF(clients);
    Py_XDECREF(list);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
        return 0;
    }
    return chosen < 0 || chosen > count ? 0 : (int)chosen;
}

/* Returns the argument of ``fail``: (lane, request id, moment of arrival) of each request. */
static PyObject *described(const request_t *requests, int count) {
    PyObject *found = PyList_New(0);
    for (int n = 0; found != NULL && n < count; n++)
        if (append(found, Py_BuildValue("(iKK)", requests[n].lane->fd, requests[n].id, requests[n].arrived_ns)))
            Py_CLEAR(found);
    return found;
}

/* Lets Python answer chosen requests whose run, or answer, failed. Returns 0, or -1: an exception is set that ends the process. */
int fail(fast_path_t *self, const request_t *requests, int count) {
    PyObject *type, *error, *trace;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *list = described(requests, count);
    PyObject *done =
        list == NULL ? NULL : PyObject_CallFunctionObjArgs(requests->plan->batch->fail, list, error == NULL ? Py_None : error, NULL);
    Py_XDECREF(list);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    for (int n = 0; n < count; n++)
        requests[n].plan->failed = 1;
    self->leave = 1;
    return 0;
}

/* Tells Python that answers of sequences were sent. Returns 0, or -1 with an exception. */
int tell_left(fast_path_t *self) {
    self->sequenced = 0;
    PyObject *done = PyObject_CallNoArgs(self->left);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}
