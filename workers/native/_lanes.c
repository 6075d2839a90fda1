/* Writes and sends answers. A lane is one submitter's socket; there may be hundreds, so memory for datagrams is lent to those that
 * something came from in this iteration.
 *
 *     received   | kind | RequestRecord | ... | kind | RequestRecord | ... |     of all lanes; requests point into it until they are
 *                                                                          answered or handed to Python
 *     answer     | kind | AnswerRecord | ... |     of one lane: sent when it is full or the iteration ends
 */

#include "_native.h"

static PyObject *answers(PyObject *module, PyObject *arguments) {
    unsigned long long number;
    PyObject *ids, *sizes, *given, *found;
    Py_buffer contents;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KO!O!O", &number, &PyList_Type, &ids, &PyTuple_Type, &sizes, &given) ||
        PyObject_GetBuffer(given, &contents, PyBUF_SIMPLE))
        return NULL;
    unsigned char stack[1024];
    tensord__writer to = tensord__write_to(stack, sizeof stack);
    to.grows = 1;
    Py_ssize_t outputs = PyTuple_Size(sizes), at = 0;
    found = PyList_New(0);
    for (Py_ssize_t n = 0; found != NULL && n < PyList_Size(ids); n++) {
        to.at = to.begin;
        tensord__put_answer(&to, 4, PyLong_AsUnsignedLongLong(PyList_GetItem(ids, n)), number, (uint64_t)outputs);
        for (Py_ssize_t i = 0; i < outputs && !to.full; i++) {
            Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GetItem(sizes, i));
            to.full = size < 0 || size > contents.len - at;
            if (!to.full)
                tensord__put_bytes(&to, (const char *)contents.buf + at, (size_t)size);
            at += size;
        }
        if (to.full || PyErr_Occurred() || append(found, PyBytes_FromStringAndSize((const char *)to.begin, to.at - to.begin)))
            break;
    }
    if (!PyErr_Occurred() && (to.full || at != contents.len))
        PyErr_Format(PyExc_ValueError, "%zd bytes for %zd answers", contents.len, PyList_Size(ids));
    if (PyErr_Occurred())
        Py_CLEAR(found);
    free(to.grown);
    PyBuffer_Release(&contents);
    return found;
}

/* See answers in workers/requests/preparation.py. */
PyMethodDef answer_methods[] = {{"answers", answers, METH_VARARGS, "(number, request_ids, sizes, contents): an encoded answer to each request."}, {NULL, NULL, 0, NULL}};

/* Returns whether Python has a request with that id, or it cannot be told. */
int in_flight(lane_t *lane, uint64_t id) {
    if (PyDict_Size(lane->in_flight) == 0)
        return 0;
    PyObject *key = PyLong_FromUnsignedLongLong(id);
    int found = key == NULL ? -1 : PyDict_Contains(lane->in_flight, key);
    Py_XDECREF(key);
    if (found < 0)
        PyErr_Clear();
    return found != 0;
}

/* Sends a lane's answers. What the socket does not take is kept for ``give_unsent``. */
void flush(lane_t *lane) {
    if (lane->answers == 0 || lane->unsent)
        return;
    tensord__writer head = tensord__write_to(lane->answer->content, DATAGRAM_HEAD);
    tensord__put_wide_datagram(&head, lane->answers);
    ssize_t sent = send(lane->fd, lane->answer->content, lane->filled, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == EINTR)) {
        lane->unsent = 1;
        return;
    }
    /* Sent, or the peer is gone: then nobody wants them. */
    lane->filled = DATAGRAM_HEAD;
    lane->answers = 0;
}

/* Lends a lane memory for answers. Not 0: there is none; no exception is set. */
static int borrow_answers(lane_t *lane) {
    if (lane->answer == NULL) {
        answers_t **spare = &lane->path->spare;
        lane->answer = *spare != NULL ? *spare : PyMem_Malloc(sizeof(answers_t));
        if (*spare != NULL)
            *spare = lane->answer->next;
        lane->filled = DATAGRAM_HEAD;
    }
    return lane->answer == NULL;
}

/* Takes back the memory for a lane's answers, which are sent or Python's. */
void give_up_answers(lane_t *lane) {
    lane->answers = 0;
    if (lane->answer == NULL)
        return;
    lane->answer->next = lane->path->spare;
    lane->path->spare = lane->answer;
    lane->answer = NULL;
}

/* Begins the answer of a request, whose contents are to follow. ``leased``: whether some lie in a lease. */
static tensord__writer begin_answer(const request_t *request, int contents, int leased) {
    lane_t *lane = request->lane;
    /* What nobody asked for is left out at the end. */
    uint64_t fields = request->timed ? 9 : request->queued_ns ? 8 : leased ? 5 : 4;
    tensord__writer to = tensord__write_to(lane->answer->content + lane->filled, TENSORD_MAX_DATAGRAM - lane->filled);
    tensord__put_answer(&to, fields, request->id, request->plan->number, (uint64_t)contents);
    return to;
}

/* Ends the answer of a request, with what it asked for besides its outputs: when it was where, and how long it took. ``lease``: NULL where
 * there is none. */
static void end_answer(const request_t *request, tensord__writer *to, const uint64_t *lease, const moments_t moments, uint64_t copied) {
    static const char *const names[TRACE_MOMENTS] = {"QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START",
                                                     "COMPUTE_END"};
    const tensord__text none = {NULL, 0};
    lane_t *lane = request->lane;
    if (lease != NULL)
        tensord__put_lease(to, lease);
    if (request->timed || request->queued_ns) {
        if (lease == NULL)
            tensord__put_nil(to);
        tensord__put_text(to, none); /* no code */
        tensord__put_text(to, none);
        if (request->queued_ns) {
            PyObject *rest = request->plan->traced;
            const uint64_t stamps[TRACE_MOMENTS] = {request->queued_ns, moments[0], moments[1], moments[2], now_ns()};
            tensord__put_timeline(to, TRACE_MOMENTS);
            for (int i = 0; i < TRACE_MOMENTS; i++)
                tensord__put_numbers(to, names[i], &stamps[i], 1);
            tensord__put(to, PyBytes_AsString(rest), (size_t)PyBytes_Size(rest));
        } else {
            tensord__put_nil(to);
        }
    }
    if (request->timed) {
        const uint64_t times[3] = {moments[0] > request->arrived_ns ? moments[0] - request->arrived_ns : 0, moments[2] - moments[0], copied};
        tensord__put_lease(to, times);
    }
    lane->filled = (size_t)(to->at - lane->answer->content);
    lane->answers++;
}

/* Writes the outputs that go to regions. ``row``: where the request begins in the run. */
static void write_regions(const request_t *request, const Py_buffer *stacks, int row) {
    const plan_t *plan = request->plan;
    for (int i = 0; i < plan->outputs; i++) {
        const output_t *output = &plan->output[i];
        if (output->region != NULL)
            memcpy(output->region, (const char *)stacks[output->stack].buf + output->start + (size_t)row * output->step, output->size);
    }
}

/* Writes the record, with the outputs that it has, or that ``lease`` has. */
static void write_answer(const request_t *request, const Py_buffer *stacks, int row, const uint64_t *lease, const moments_t moments,
                         uint64_t copied) {
    const plan_t *plan = request->plan;
    tensord__writer to = begin_answer(request, plan->inside, lease != NULL);
    for (int i = 0; i < plan->outputs; i++) {
        const output_t *output = &plan->output[i];
        if (output->stack == LEASED)
            tensord__put_slice(&to, lease[0], lease[1] + output->start, output->size);
        else if (output->region == NULL)
            tensord__put_bytes(&to, (const char *)stacks[output->stack].buf + output->start + (size_t)row * output->step, output->size);
    }
    end_answer(request, &to, lease, moments, plan->copied + copied);
}

/* Returns whether the regions of these requests lost no page meanwhile. Marks the plan of the one that did as failed. */
static int intact(const request_t *requests, int count) {
    for (int n = 0; n < count; n++) {
        PyObject *check = requests[n].plan->intact;
        if (check == NULL || (n > 0 && requests[n - 1].plan == requests[n].plan))
            continue;
        PyObject *result = PyObject_CallNoArgs(check);
        if (result == NULL) {
            requests[n].plan->failed = 1;
            return 0;
        }
        Py_DECREF(result);
    }
    return 1;
}

/* Returns whether a run's results are large enough for the answer of the request at that row. */
static int holds(const plan_t *plan, const Py_buffer *stacks, Py_ssize_t count, int row, const uint64_t *lease) {
    for (int i = 0; i < plan->outputs; i++) {
        const output_t *output = &plan->output[i];
        if (output->stack == LEASED && lease != NULL)
            continue;
        if (output->stack == LEASED || output->stack >= count || output->start + (size_t)row * output->step + output->size > (size_t)stacks[output->stack].len)
            return 0;
    }
    return 1;
}

/* Writes the answers of a run. ``lease``: where the large outputs lie, NULL where there is none; ``copied``: bytes, besides what plans
 * say. Not 0: none was written, and an exception may be set. */
int answer(const request_t *requests, int count, PyObject *made, const uint64_t *lease, const moments_t moments, uint64_t copied) {
    Py_buffer stacks[MAX_TENSORS];
    Py_ssize_t open = 0, given = PyList_Size(made);
    int wrong = given < 0 || given > MAX_TENSORS, row = 0;
    while (!wrong && open < given) {
        wrong = PyObject_GetBuffer(PyList_GetItem(made, open), &stacks[open], PyBUF_SIMPLE);
        open += !wrong;
    }
    for (int n = 0; n < count && !wrong; row += requests[n++].plan->rows)
        wrong = !holds(requests[n].plan, stacks, given, row, lease);
    row = 0;
    for (int n = 0; n < count && !wrong; row += requests[n++].plan->rows)
        write_regions(&requests[n], stacks, row);
    /* Asked after the last byte was read and written: a page that was missing meanwhile makes the answers void. */
    wrong = wrong || !intact(requests, count);
    row = 0;
    for (int n = 0; n < count && !wrong; row += requests[n++].plan->rows)
        write_answer(&requests[n], stacks, row, lease, moments, copied);
    while (open-- > 0)
        PyBuffer_Release(&stacks[open]);
    return wrong;
}

/* Returns whether there is room for the answers of all of them; sends answers to make some. */
int has_room(const request_t *requests, int count) {
    size_t size = 0;
    for (int n = 0; n < count; n++)
        size += requests[n].plan->answer_size + (requests[n].queued_ns ? requests[n].plan->timeline_size : 0);
    for (int n = 0; n < count; n++) {
        lane_t *lane = requests[n].lane;
        if (borrow_answers(lane))
            return 0;
        if (lane->filled + size > TENSORD_MAX_DATAGRAM)
            flush(lane);
        if (lane->unsent || size > MAX_ANSWER)
            return 0;
    }
    return 1;
}
