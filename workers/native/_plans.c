/* Reads what Python tells of requests (workers/dispatch/fast_path.py): a plan for each number of a lane, and one batch for all plans
 * whose requests can share a run, with its programs.
 *
 *     lane ─▶ plan of number 0, 1, ...      where inputs go and outputs lie
 *               ╰─▶ batch                 one load of a version, one shape
 *                     ╰─▶ programs        by the number of rows that wait
 *
 * Functions that read return 0, or -1 with an exception. Python tells nothing that is wrong; a ValueError means that such requests
 * cannot be run here.
 */

#include "_native.h"

/* Lets a plan go of its batch. */
static void drop_batch(batch_t *batch) {
    if (--batch->plans > 0)
        return;
    if (batch->link != NULL) {
        *batch->link = batch->next;
        if (batch->next != NULL)
            batch->next->link = batch->link;
    }
    for (int i = 0; i < batch->made; i++)
        Py_XDECREF(batch->program[i].run);
    Py_XDECREF(batch->owner);
    Py_XDECREF(batch->choose);
    Py_XDECREF(batch->fail);
    PyBuffer_Release(&batch->durations);
    PyBuffer_Release(&batch->bounds);
    PyMem_Free(batch->program);
    PyMem_Free(batch);
}

/* Frees a plan, if there is one, and clears the pointer. */
void drop_plan(plan_t **place) {
    plan_t *plan = *place;
    *place = NULL;
    if (plan == NULL)
        return;
    if (plan->batch != NULL)
        drop_batch(plan->batch);
    Py_XDECREF(plan->intact);
    Py_XDECREF(plan->alone);
    Py_XDECREF(plan->traced);
    Py_XDECREF(plan->sets);
    PyMem_Free(plan);
}

/* Finds the parameter set that a request names; NULL: the main set. Not 0: it is Python's to find it. Sets no exception. */
int find_set(const plan_t *plan, tensord__text name, PyObject **set) {
    *set = NULL;
    if (name.size == 0)
        return 0;
    if (plan->sets == NULL)
        return -1;
    if (tensord__is(name, MAIN_SET))
        return 0;
    PyObject *key = PyUnicode_DecodeUTF8(name.at, (Py_ssize_t)name.size, NULL);
    if (key != NULL)
        *set = PyDict_GetItemWithError(plan->sets, key);
    Py_XDECREF(key);
    if (*set != NULL)
        return 0;
    PyErr_Clear();
    return -1;
}

/* Raises ValueError. Returns -1. */
int refuse(const char *reason) {
    PyErr_SetString(PyExc_ValueError, reason);
    return -1;
}

/* Reads (run, rows, clears, ((address, stride), ...)). */
static int read_program(PyObject *given, program_t *program) {
    PyObject *run, *arguments;
    if (!PyArg_ParseTuple(given, "OipO!", &run, &program->rows, &program->clears, &PyTuple_Type, &arguments))
        return -1;
    program->count = (int)PyTuple_Size(arguments);
    if (program->count > MAX_TENSORS || program->rows < 1 || program->rows > MAX_ROWS)
        return refuse("a program has too many arguments, too many rows, or none");
    for (int i = 0; i < program->count; i++) {
        unsigned long long address;
        Py_ssize_t stride;
        if (!PyArg_ParseTuple(PyTuple_GetItem(arguments, i), "Kn", &address, &stride))
            return -1;
        if (stride < 0)
            return refuse("a program's rows lie backwards");
        program->arguments[i] = (argument_t){(char *)(uintptr_t)address, (size_t)stride};
    }
    Py_INCREF(run);
    program->run = run;
    return 0;
}

/* Reads a batch. ``programs``: each one once; ``by_rows``: which of them for one row, two, ...; -1: none. */
static int read_batch(batch_t *batch, PyObject *programs, PyObject *by_rows) {
    Py_ssize_t made = PyTuple_Size(programs), most = PyTuple_Size(by_rows);
    if (most < 1 || most > MAX_ROWS)
        return refuse("programs for too many rows, or for none");
    batch->program = PyMem_Calloc((size_t)made + 1, sizeof(program_t));
    if (batch->program == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; batch->made < (int)made; batch->made++)
        if (read_program(PyTuple_GetItem(programs, batch->made), &batch->program[batch->made]))
            return -1;
    for (batch->most = 0; batch->most < (int)most; batch->most++) {
        long number = PyLong_AsLong(PyTuple_GetItem(by_rows, batch->most));
        if (number == -1 && PyErr_Occurred())
            return -1;
        if (number >= made)
            return refuse("there is no such program");
        batch->programs[batch->most] = number < 0 ? -1 : (int)number;
    }
    return 0;
}

/* Reads (choose, fail), or None: the model has no sequences. */
static int read_sequences(PyObject *sequences, batch_t *batch) {
    if (sequences == Py_None)
        return 0;
    if (!PyArg_ParseTuple(sequences, "OO", &batch->choose, &batch->fail))
        return -1;
    Py_INCREF(batch->choose);
    Py_INCREF(batch->fail);
    for (int i = 0; i < batch->most; i++)
        if (batch->programs[i] < 0 || batch->program[batch->programs[i]].rows <= i)
            return refuse("sequences need a program for any number of rows");
    return 0;
}

/* Reads (counts, bounds): arrays of 64 bits each. */
static int read_durations(PyObject *durations, batch_t *batch) {
    PyObject *counts, *bounds;
    if (!PyArg_ParseTuple(durations, "OO", &counts, &bounds) || PyObject_GetBuffer(counts, &batch->durations, PyBUF_WRITABLE) ||
        PyObject_GetBuffer(bounds, &batch->bounds, PyBUF_SIMPLE))
        return -1;
    Py_ssize_t count = batch->bounds.len / (Py_ssize_t)sizeof(uint64_t);
    if (count < 1 || count > MAX_BUCKETS ||
        batch->durations.len != PROTOCOLS * DURATION_KINDS * (count + 2) * (Py_ssize_t)sizeof(uint64_t))
        return refuse("the histograms have other sizes");
    return 0;
}

/* Returns a batch that no plan has yet, as the first of ``batches``, or NULL with an exception. ``given``: Batch of _native.pyi. */
batch_t *make_batch(batch_t **batches, PyObject *given) {
    unsigned long long model, most_waiting, delay_ns;
    int full, grouped, mixes;
    PyObject *owner, *programs, *by_rows, *sequences, *durations;
    double share;
    if (!PyArg_ParseTuple(given, "OKKdKippO!O!OO!", &owner, &model, &most_waiting, &share, &delay_ns, &full, &grouped, &mixes,
                          &PyTuple_Type, &programs, &PyTuple_Type, &by_rows, &sequences, &PyTuple_Type, &durations))
        return NULL;
    batch_t *batch = PyMem_Calloc(1, sizeof(batch_t));
    if (batch == NULL)
        return (batch_t *)PyErr_NoMemory();
    Py_INCREF(owner);
    batch->owner = owner;
    batch->model = model;
    batch->most_waiting = most_waiting;
    batch->share = share;
    batch->delay_ns = delay_ns;
    batch->full = full;
    batch->grouped = grouped;
    batch->mixes = mixes;
    if (read_batch(batch, programs, by_rows) || read_sequences(sequences, batch) || read_durations(durations, batch)) {
        drop_batch(batch);
        return NULL;
    }
    batch->next = *batches;
    batch->link = batches;
    if (batch->next != NULL)
        batch->next->link = &batch->next;
    *batches = batch;
    return batch;
}

/* Returns whether an input's bytes fit into the argument of each program: in one row, or in rows without gaps. */
static int fits(const plan_t *plan, const input_t *input) {
    for (int i = 0; i < plan->batch->made; i++) {
        const program_t *program = &plan->batch->program[i];
        if (input->argument < 0 || input->argument >= program->count)
            return 0;
        size_t stride = program->arguments[input->argument].stride;
        if (plan->rows == 1 ? input->size > stride : input->size != stride * (size_t)plan->rows)
            return 0;
    }
    return 1;
}

/* Reads a plan's tensors. ``inputs``: (argument, size, address) each; ``outputs``: (stack, start, step, size, address) each. Address 0:
 * the bytes are in the record. Of a large request (``plan->alone``) neither the argument nor the step counts. */
int read_tensors(PyObject *inputs, PyObject *outputs, plan_t *plan) {
    unsigned long long address;
    Py_ssize_t start, step, size;
    int alone = plan->alone != NULL;
    plan->inputs = (int)PyTuple_Size(inputs);
    plan->outputs = (int)PyTuple_Size(outputs);
    if (plan->inputs > MAX_TENSORS || plan->outputs > MAX_TENSORS || plan->rows < 1 || plan->rows > MAX_ROWS)
        return refuse("too many tensors, too many rows, or none");
    if (plan->batch->choose != NULL && plan->rows > 1)
        return refuse("a request of a sequence has one row");
    for (int i = 0; i < plan->inputs; i++) {
        input_t *input = &plan->input[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(inputs, i), "inK", &input->argument, &size, &address))
            return -1;
        if (size < 0)
            return refuse("an input of fewer than no bytes");
        input->size = (size_t)size;
        input->region = (const char *)(uintptr_t)address;
        plan->copied += alone ? 0 : input->size;
        if (!fits(plan, input))
            return refuse("an input does not fit into a program");
    }
    plan->answer_size = ANSWER_RECORD_HEAD + TIMING_SIZE + (alone ? LEASE_SIZE : 0);
    for (int i = 0; i < plan->outputs; i++) {
        output_t *output = &plan->output[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(outputs, i), "innnK", &output->stack, &start, &step, &size, &address))
            return -1;
        int gathered = alone || (output->stack >= 0 && (plan->rows == 1 || size == step * plan->rows));
        if (output->stack < LEASED || start < 0 || step < 0 || size < 0 || !gathered)
            return refuse("an output begins nowhere");
        output->start = (size_t)start;
        output->step = (size_t)step;
        output->size = (size_t)size;
        output->region = (char *)(uintptr_t)address;
        plan->copied += output->stack == LEASED ? 0 : output->size;
        if (output->region == NULL) {
            plan->inside++;
            plan->answer_size += output->stack == LEASED ? SLICE_SIZE : BIN_HEAD + output->size;
        }
    }
    return plan->answer_size > MAX_ANSWER ? refuse("an answer does not fit into a datagram") : 0;
}

/* Returns (owner, figures, ...) and clears the figures. */
PyObject *take_figures(batch_t *batch) {
    figures_t *made = &batch->figures;
    PyObject *sizes = PyList_New(0);
    for (int size = 1; sizes != NULL && size <= MAX_ROWS; size++) {
        size_figures_t *one = &made->sizes[size];
        if (one->runs == 0)
            continue;
        if (append(sizes, Py_BuildValue("iKKKK", size, one->runs, one->ns[0], one->ns[1], one->ns[2])))
            Py_CLEAR(sizes);
    }
    if (sizes == NULL)
        return NULL;
    PyObject *found = Py_BuildValue("OKKKKKK(KKK)N", batch->owner, made->answered, made->rows, made->runs, made->request_ns,
                                    made->queue_ns, made->copied, made->compute_ns[0], made->compute_ns[1], made->compute_ns[2], sizes);
    memset(made, 0, sizeof *made);
    return found;
}
