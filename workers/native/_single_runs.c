/* Runs one large request by itself, with its tensors where they lie in the arenas.
 *
 *     RequestRecord ─▶ (place or bytes, ...) ─▶ plan->alone (workers/processor/single_run.py) ─▶ lease, small outputs ─▶ AnswerRecord
 *
 * ``alone`` returns (segment, offset, generation, [small output, ...]), where segment -1 means that there is no lease, or None: then
 * the request is for Python.
 */

#include "_native.h"

/* Reads a plan's tensors. ``inputs``: sizes; ``outputs``: (stack, start, size) each. Not 0: an exception is set. */
int read_single_tensors(PyObject *inputs, PyObject *outputs, plan_t *plan) {
    plan->inputs = (int)PyTuple_Size(inputs);
    plan->outputs = plan->inside = (int)PyTuple_Size(outputs);
    if (plan->inputs > MAX_TENSORS || plan->outputs > MAX_TENSORS || plan->rows < 1 || plan->rows > MAX_ROWS)
        return refuse("too many tensors, too many rows, or none");
    for (int i = 0; i < plan->inputs; i++) {
        Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GetItem(inputs, i));
        if (size < 0)
            return PyErr_Occurred() ? -1 : refuse("an input of fewer than no bytes");
        plan->input[i].size = (size_t)size;
    }
    plan->answer_size = ANSWER_RECORD_HEAD + LEASE_SIZE + TIMING_SIZE;
    for (int i = 0; i < plan->outputs; i++) {
        output_t *output = &plan->output[i];
        Py_ssize_t start, size;
        if (!PyArg_ParseTuple(PyTuple_GetItem(outputs, i), "inn", &output->stack, &start, &size))
            return -1;
        if (output->stack < LEASED || start < 0 || size < 0)
            return refuse("an output begins nowhere");
        output->start = (size_t)start;
        output->size = (size_t)size;
        if (output->stack == LEASED) {
            plan->answer_size += SLICE_SIZE;
        } else {
            plan->answer_size += BIN_HEAD + output->size;
            plan->copied += output->size;
        }
    }
    return plan->answer_size > MAX_ANSWER ? refuse("an answer does not fit into a datagram") : 0;
}

/* Returns a tuple of a request's tensors: each its place (segment, offset), or its bytes, which are copied and counted. */
PyObject *places_of(const request_t *request, uint64_t *copied) {
    tensord__reader reader = tensord__read_from(request->record + request->context, request->size - request->context);
    uint64_t fields = tensord__take_array(&reader);
    tensord__take_text(&reader);
    tensord__request record = tensord__take_request(&reader, fields);
    PyObject *places = PyTuple_New((Py_ssize_t)record.count);
    for (uint64_t i = 0; places != NULL && i < record.count; i++) {
        tensord__content content = tensord__take_content(&record.contents);
        PyObject *one = content.bytes == NULL ? Py_BuildValue("KK", content.segment, content.offset)
                                              : PyBytes_FromStringAndSize((const char *)content.bytes, (Py_ssize_t)content.byte_size);
        *copied += content.bytes == NULL ? 0 : content.byte_size;
        if (one == NULL || PyTuple_SetItem(places, (Py_ssize_t)i, one))
            Py_CLEAR(places);
    }
    return places;
}

/* Writes the answer. ``copied``: bytes of inputs. Not 0: it was not written, and an exception may be set. */
int answer_alone(const request_t *request, PyObject *made, const moments_t moments, uint64_t copied) {
    long long segment;
    unsigned long long offset, generation;
    PyObject *inside;
    if (!PyArg_ParseTuple(made, "LKKO!", &segment, &offset, &generation, &PyList_Type, &inside))
        return -1;
    Py_buffer stacks[MAX_TENSORS];
    Py_ssize_t open = 0, given = PyList_Size(inside);
    const plan_t *plan = request->plan;
    int wrong = given > MAX_TENSORS;
    while (!wrong && open < given) {
        wrong = PyObject_GetBuffer(PyList_GetItem(inside, open), &stacks[open], PyBUF_SIMPLE);
        open += !wrong;
    }
    for (int i = 0; i < plan->outputs && !wrong; i++) {
        const output_t *output = &plan->output[i];
        if (output->stack == LEASED)
            wrong = segment < 0;
        else
            wrong = output->stack >= given || output->start + output->size > (size_t)stacks[output->stack].len;
    }
    if (!wrong) {
        const uint64_t lease[3] = {(uint64_t)segment, offset, generation};
        tensord__writer to = begin_answer(request, plan->outputs, segment >= 0);
        for (int i = 0; i < plan->outputs; i++) {
            const output_t *output = &plan->output[i];
            if (output->stack == LEASED)
                tensord__put_slice(&to, lease[0], offset + output->start, output->size);
            else
                tensord__put_bytes(&to, (const char *)stacks[output->stack].buf + output->start, output->size);
        }
        end_answer(request, &to, segment >= 0 ? lease : NULL, moments, plan->copied + copied);
    }
    while (open-- > 0)
        PyBuffer_Release(&stacks[open]);
    return wrong;
}

/* Releases leases, whose records have come. Returns 0: done; 1: done, and Python has to tell the peer that a segment is closed;
 * -1: none was released. Sets no exception. */
int take_back(lane_t *lane, const tensord__reader *records, size_t count) {
    PyObject *datagram = datagram_of(records, count, count);
    PyObject *taken = datagram == NULL ? NULL : PyObject_CallFunctionObjArgs(lane->take_back, datagram, NULL);
    Py_XDECREF(datagram);
    int closed = taken == NULL ? -1 : PyObject_IsTrue(taken);
    if (closed < 0)
        PyErr_Clear();
    Py_XDECREF(taken);
    return closed;
}
