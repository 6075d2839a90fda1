/* Runs waiting requests: which of them together, where their inputs go, what is counted, and when answers are sent.
 *
 * ``run`` and what it calls return 0: done; 1: the requests are for Python; -1: an exception is set that ends the process, because
 * it is no Exception. What a run raises otherwise is dropped: Python runs the requests again and finds the reason.
 */

#include "_native.h"

/* How far behind the requests of a run others of their parameter set are looked for. */
#define WINDOW 256
/* Answers of several runs share a datagram while so many requests wait, and the runs together have less to do than makes up an
 * iteration of the loop (Executable.share in Python). So many calls of programs make up one as well. */
#define MANY 4
#define CALLS 32
/* So many iterations' work is done at most before Python looks what else has come, whatever came together: others wait meanwhile. */
#define MOST_DONE 16

/* Counts a duration in a histogram: counts by bucket, the last beyond all bounds, and the sum. */
static void observe(uint64_t *histogram, const uint64_t *bounds, size_t count, uint64_t ns) {
    size_t bucket = 0;
    while (bucket < count && bounds[bucket] < ns)
        bucket++;
    histogram[bucket]++;
    histogram[count + 1] += ns;
}

/* Counts a run. */
static void count_run(batch_t *batch, const request_t *requests, int count, int rows, const moments_t moments) {
    figures_t *figures = &batch->figures;
    uint64_t runs = batch->grouped ? (uint64_t)count : 1;
    size_figures_t *size = &figures->sizes[batch->grouped ? 1 : rows];
    const uint64_t *bounds = batch->bounds.buf;
    size_t buckets = (size_t)batch->bounds.len / sizeof(uint64_t);
    for (int n = 0; n < count; n++) {
        uint64_t arrived = requests[n].arrived_ns, took = moments[3] > arrived ? moments[3] - arrived : 0;
        /* A request that arrived after this run began has not waited. */
        uint64_t waited = moments[0] > arrived ? moments[0] - arrived : 0;
        uint64_t *histogram = (uint64_t *)batch->durations.buf + (size_t)requests[n].lane->protocol * DURATION_KINDS * (buckets + 2);
        observe(histogram, bounds, buckets, took);
        observe(histogram + buckets + 2, bounds, buckets, waited);
        observe(histogram + 2 * (buckets + 2), bounds, buckets, moments[3] - moments[0]);
        figures->request_ns += took;
        figures->queue_ns += waited;
        figures->copied += requests[n].plan->copied;
        requests[n].lane->path->lane_requests += requests[n].lane->most > 0;
    }
    figures->answered += (uint64_t)count;
    figures->rows += (uint64_t)rows;
    figures->runs += runs;
    size->runs += runs;
    for (int part = 0; part < 3; part++) {
        uint64_t took = moments[part + 1] - moments[part];
        size->ns[part] += took;
        figures->compute_ns[part] += took * (uint64_t)count;
    }
}

/* Returns whether a request may be computed together with the first one. */
static int is_alike(const request_t *first, const request_t *other) {
    const batch_t *batch = first->plan->batch;
    return other->plan->batch == batch && (batch->mixes || other->set == first->set);
}

/* Returns whether the first request goes on waiting for others that can share its run, and notes until when. */
static int goes_on_waiting(fast_path_t *self) {
    const request_t *first = &self->waiting[self->first];
    const batch_t *batch = first->plan->batch;
    if (batch->delay_ns == 0)
        return 0;
    for (size_t i = 0; i < self->held; i++)
        if (is_alike(first, &self->waiting[i]))
            return 1;
    int rows = 0;
    for (size_t i = self->first; i < self->count && rows < batch->full; i++)
        rows += is_alike(first, &self->waiting[i]) ? self->waiting[i].plan->rows : 0;
    uint64_t due_ns = first->arrived_ns + batch->delay_ns;
    if (rows >= batch->full || due_ns <= now_ns())
        return 0;
    if (due_ns < self->due_ns)
        self->due_ns = due_ns;
    return 1;
}

/* Brings requests of the first one's parameter set to the front, from behind others of their batch that name other sets. */
static void bring_forward(request_t *requests, size_t left) {
    const batch_t *batch = requests->plan->batch;
    size_t front = 1, end = left < WINDOW || batch->delay_ns ? left : WINDOW;
    while (front < end && is_alike(requests, &requests[front]))
        front++;
    /* Steps of a sequence keep their order. */
    if (front == end || requests[front].plan->batch != batch || batch->choose != NULL)
        return;
    for (size_t i = front + 1; i < end && front < (size_t)batch->most; i++) {
        if (!is_alike(requests, &requests[i]))
            continue;
        request_t one = requests[i];
        memmove(&requests[front + 1], &requests[front], (i - front) * sizeof one);
        requests[front++] = one;
    }
}

/* Chooses how many of the first requests share a run, their rows, and its program. Returns NULL if they are for Python. */
static const program_t *choose(const fast_path_t *self, int *count, int *rows) {
    request_t *requests = &self->waiting[self->first];
    const batch_t *batch = requests->plan->batch;
    size_t left = self->count - self->first;
    /* What does not wait for more is run before the time is over, without what is more. */
    int most = batch->delay_ns && requests->arrived_ns + batch->delay_ns > now_ns() ? batch->full : batch->most;
    int together = 0, number = 0;
    bring_forward(requests, left);
    while ((size_t)number < left && is_alike(requests, &requests[number]) && together + requests[number].plan->rows <= most)
        together += requests[number++].plan->rows;
    if (number == 0 || batch->programs[together - 1] < 0)
        return NULL;
    const program_t *program = &batch->program[batch->programs[together - 1]];
    while (together > program->rows)
        together -= requests[--number].plan->rows;
    *count = number;
    *rows = together;
    return number == 0 ? NULL : program;
}

/* Copies inputs to the program's memory, one request behind the other. */
static void gather(const program_t *program, const request_t *requests, int count, int rows) {
    for (int n = 0, row = 0; n < count; row += requests[n++].plan->rows) {
        const plan_t *plan = requests[n].plan;
        for (int i = 0; i < plan->inputs; i++) {
            const argument_t *argument = &program->arguments[plan->input[i].argument];
            memcpy(argument->address + (size_t)row * argument->stride, requests[n].contents[i], plan->input[i].size);
        }
    }
    for (int i = 0; program->clears && i < program->count; i++) {
        const argument_t *argument = &program->arguments[i];
        memset(argument->address + (size_t)rows * argument->stride, 0, (size_t)(program->rows - rows) * argument->stride);
    }
}

/* Writes the status page as StatusPage.set_state does. */
static void set_state(fast_path_t *self, uint64_t state, uint64_t now) {
    self->page[PAGE_STATE] = state;
    self->page[PAGE_SINCE] = now;
    self->page[PAGE_BEAT] = now;
}

/* Returns the parameter sets of a run as its last argument: of all requests, or, where they may differ, of each row: None for the
 * main set. ``named``: whether it is any but the main set; otherwise there is no such argument. NULL with an exception, or if not named. */
static PyObject *sets_of(const request_t *requests, int count, int rows, int *named) {
    *named = requests->set != NULL;
    if (!requests->plan->batch->mixes) {
        Py_XINCREF(requests->set);
        return requests->set;
    }
    for (int n = 1; n < count && !*named; n++)
        *named = requests[n].set != NULL;
    PyObject *found = *named ? PyTuple_New(rows) : NULL;
    for (int n = 0, row = 0; found != NULL && n < count; n++)
        for (int i = 0; found != NULL && i < requests[n].plan->rows; i++, row++) {
            PyObject *set = requests[n].set == NULL ? Py_None : requests[n].set;
            Py_INCREF(set);
            if (PyTuple_SetItem(found, row, set))
                Py_CLEAR(found);
        }
    return found;
}

/* Calls what runs these requests, with the slot saying so meanwhile. Returns what it returns. ``first``, ``second``: its arguments; NULL:
 * there are no more. */
static PyObject *execute(fast_path_t *self, const request_t *requests, int count, PyObject *call, PyObject *first, PyObject *second,
                         moments_t moments) {
    _Atomic uint64_t *slot = self->page + self->slot;
    for (int n = 0; n < count; n++) {
        slot[1 + 2 * n] = requests[n].lane->peer;
        slot[2 + 2 * n] = requests[n].id;
    }
    /* The count is written last and cleared afterwards: if the run kills this process, the page says with which requests. */
    moments[1] = now_ns();
    slot[SLOT_MODEL] = requests->plan->batch->model;
    slot[SLOT_SINCE] = moments[1];
    slot[0] = (uint64_t)count;
    set_state(self, self->executing, moments[1]);
    PyObject *made = PyObject_CallFunctionObjArgs(call, first, second, NULL);
    moments[2] = now_ns();
    slot[0] = 0;
    set_state(self, self->idle, moments[2]);
    return made;
}

/* Leaves requests whose run or answers failed to Python, now and in future. */
static int give_up(const request_t *requests, int count) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Clear();
    /* Only a region that lost pages tells which request was at fault; otherwise none of them is run here again. */
    int found = 0;
    for (int n = 0; n < count; n++)
        found |= requests[n].plan->failed;
    for (int n = 0; n < count && !found; n++)
        requests[n].plan->failed = 1;
    return 1;
}

/* Leaves requests whose run failed to Python: these alone if they name a parameter set, which may be why; otherwise in future, too. */
static int give_up_run(const request_t *requests, int count, int named) {
    if (!named || (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)))
        return give_up(requests, count);
    PyErr_Clear();
    return 1;
}

/* Returns a tuple of a request's tensors: each its place (segment, offset), or its bytes, which are copied and counted. */
static PyObject *places_of(const request_t *request, uint64_t *copied) {
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

/* Writes the answer of a large request. ``made``: (segment, offset, generation, [small output, ...]), where segment -1 means that there is
 * no lease. ``copied``: bytes of inputs. Not 0: it was not written, and an exception may be set. */
static int answer_alone(const request_t *request, PyObject *made, const moments_t moments, uint64_t copied) {
    long long segment;
    unsigned long long offset, generation;
    PyObject *inside;
    if (!PyArg_ParseTuple(made, "LKKO!", &segment, &offset, &generation, &PyList_Type, &inside))
        return -1;
    const uint64_t lease[3] = {(uint64_t)segment, offset, generation};
    return answer(request, 1, inside, segment < 0 ? NULL : lease, moments, copied);
}

/* Runs the first request, a large one, by itself: ``alone`` (workers/processor/single_run.py) reads and writes its tensors where they lie
 * in the arenas. If it returns None, the request is for Python. */
static int run_alone(fast_path_t *self) {
    const request_t *request = &self->waiting[self->first];
    const batch_t *batch = request->plan->batch;
    /* Large requests that can share a run are gathered by Python. */
    int shared = self->first + 1 < self->count && is_alike(request, &request[1]) && batch->most > request->plan->rows;
    if (shared || !has_room(request, 1))
        return 1;
    moments_t moments = {now_ns()};
    uint64_t copied = 0;
    PyObject *places = places_of(request, &copied);
    PyObject *made = places == NULL ? NULL : execute(self, request, 1, request->plan->alone, places, request->set, moments);
    Py_XDECREF(places);
    int outcome = made == Py_None ? 1 : 0;
    if (made == NULL)
        outcome = give_up_run(request, 1, request->set != NULL);
    else if (outcome == 0 && answer_alone(request, made, moments, copied))
        outcome = give_up(request, 1);
    Py_XDECREF(made);
    if (outcome == 0) {
        moments[3] = now_ns();
        count_run(request->plan->batch, request, 1, request->plan->rows, moments);
        request->plan->batch->figures.copied += copied;
        self->first++;
        /* Beside large tensors others need the processor: do not poll before the next wait. */
        self->together = FEW + 1;
        self->done += 1.0 / CALLS + batch->share * request->plan->rows;
    }
    return outcome;
}

/* Runs the first requests, as many as can share a run. */
static int run(fast_path_t *self) {
    const request_t *requests = &self->waiting[self->first];
    if (requests->plan->alone != NULL)
        return run_alone(self);
    int count, rows;
    const batch_t *batch = requests->plan->batch;
    const program_t *program = choose(self, &count, &rows);
    if (program == NULL || !has_room(requests, count))
        return 1;
    moments_t moments = {now_ns()};
    if (batch->choose != NULL) {
        /* A request of a sequence has one row. */
        count = rows = choose_requests(requests, count);
        if (count <= 0)
            return count < 0 ? -1 : 1;
        program = &batch->program[batch->programs[count - 1]];
        self->sequenced = 1;
    }
    gather(program, requests, count, rows);
    int named;
    PyObject *sets = sets_of(requests, count, rows, &named);
    PyObject *made = named && sets == NULL ? NULL : execute(self, requests, count, program->run, sets, NULL, moments);
    Py_XDECREF(sets);
    if (made == NULL && named)
        return give_up_run(requests, count, named);
    int wrong = made == NULL || answer(requests, count, made, NULL, moments, 0);
    Py_XDECREF(made);
    if (wrong && batch->choose != NULL) {
        wrong = fail(self, requests, count);
        self->first += (size_t)count;
        return wrong;
    }
    if (wrong)
        return give_up(requests, count);
    moments[3] = now_ns();
    count_run(requests->plan->batch, requests, count, rows, moments);
    self->first += (size_t)count;
    double work = batch->share * program->rows;
    /* Work that is not known is taken for one iteration's: XLA makes loops also of small programs, such as a step of sequences. */
    self->done += 1.0 / CALLS + (work > 1 ? 1 : work);
    return 0;
}

/* Returns whether more requests wait than a queue of theirs may take. */
static int too_many(const fast_path_t *self) {
    for (size_t i = 0; i < self->count; i++)
        if (self->count > self->waiting[i].plan->batch->most_waiting)
            return 1;
    return 0;
}

/* Sends the answers of all lanes. Returns whether a socket did not take some. */
static int flush_all(fast_path_t *self) {
    int unsent = 0;
    for (lane_t *lane = self->active; lane != NULL; lane = lane->next_active) {
        flush(lane);
        unsent |= lane->unsent;
    }
    return unsent;
}

/* Runs what waits and sends the answers; what is for Python goes to ``datagrams``. Returns 0, or -1 with an exception. */
int serve(fast_path_t *self, PyObject *datagrams) {
    self->done = 0;
    self->together = self->count;
    /* Python refuses what is too much for a queue. */
    int outcome = self->doubtful || too_many(self);
    for (size_t i = 0; i < self->count; i++)
        activate(self, self->waiting[i].lane);
    self->held = 0;
    self->due_ns = UINT64_MAX;
    while (outcome == 0 && self->first < self->count) {
        /* After a long run, or many, Python first looks what else has come, and its queue knows whose turn it is. */
        if (self->done >= (self->waiting[self->first].plan->alone != NULL ? 1 : MOST_DONE))
            break;
        if (goes_on_waiting(self)) {
            self->waiting[self->held++] = self->waiting[self->first++];
            continue;
        }
        outcome = run(self);
        if (outcome == 0 && (self->count - self->first < MANY || self->done >= 1))
            outcome = flush_all(self);
    }
    int unsent = flush_all(self);
    if (outcome >= 0 && self->sequenced && !unsent && tell_left(self))
        return -1;
    if (outcome < 0)
        return -1;
    size_t left = self->count - self->first;
    memmove(&self->waiting[self->held], &self->waiting[self->first], left * sizeof *self->waiting);
    self->first = 0;
    self->count = self->held + left;
    return outcome == 0 && left == 0 && self->count && keep_held(self) == 0 ? 0 : give_back(self, datagrams);
}
