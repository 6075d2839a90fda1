/* The turns of a worker's loop in which nothing happens but small requests of known forms: received, run and answered here.
 *
 *     epoll ─▶ datagram of FormSubmits ─▶ gathered into a program's memory ─▶ program.run (Python, XLA) ─▶ FormCompletions
 *           └▶ anything else is given back to Python, which does it the ordinary way
 *
 * What is known is said by Python (workers/fast_path.py): a plan for each form of a lane, and the programs that can run it. Nothing
 * of that can change while ``wait`` runs, because all that could change it comes as an event, and with the first other event, or
 * anything in a datagram that has no plan, ``wait`` returns. What it gives back it has not touched.
 *
 * The status page is written as shm/status_page.py does. Records are in _records.h, what is known in _plans.h, sockets in _lanes.h.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "_lone_runs.h"

#define MAX_EVENTS 64
/* Records of leases that are given back, in one datagram. */
#define MAX_RELEASES 8
/* Answers of further runs share a datagram only while so many requests wait, and for no longer than that. */
#define MANY 4
/* With more requests on their way there is soon something to do, and waking up is shared by them. */
#define FEW 4
#define RUN_ON_NS 250000
/* epoll counts in milliseconds; shorter waits are counted in nanoseconds. */
#define SHORT_NS 50000000

typedef struct {
    PyObject_HEAD
    int epoll, worth;
    /* When the last wait ended. */
    uint64_t ended;
    /* Of the last requests that were served so many came together. */
    size_t together;
    uint64_t look_ns;
    _Atomic uint64_t *page;
    Py_buffer page_buffer;
    size_t desk;
    uint64_t idle, executing;
    lane_t *lanes;
    request_t *waiting;
    size_t first, count, room;
} fast_path_t;

/* ------------------------------------------------------------------------------------------------------------- what is known */

static lane_t *find_lane(fast_path_t *self, int fd) {
    lane_t *lane = self->lanes;
    while (lane != NULL && lane->fd != fd)
        lane = lane->next;
    return lane;
}

static lane_t *known_lane(fast_path_t *self, int fd) {
    lane_t *lane = find_lane(self, fd);
    if (lane == NULL)
        PyErr_Format(PyExc_KeyError, "descriptor %d is no lane", fd);
    return lane;
}

static batch_t *find_batch(fast_path_t *self, PyObject *owner) {
    for (lane_t *lane = self->lanes; lane != NULL; lane = lane->next)
        for (int i = 0; i < lane->forms; i++)
            if (lane->plans[i] != NULL && lane->plans[i]->batch->owner == owner)
                return lane->plans[i]->batch;
    return NULL;
}

/* A plan without its tensors. */
static plan_t *make_plan(fast_path_t *self, PyObject *given, int rows, unsigned long long answer_form) {
    unsigned long long most_waiting;
    int series;
    PyObject *owner, *programs, *by_rows;
    if (!PyArg_ParseTuple(given, "OKpO!O!", &owner, &most_waiting, &series, &PyTuple_Type, &programs, &PyTuple_Type, &by_rows))
        return NULL;
    plan_t *plan = PyMem_Calloc(1, sizeof(plan_t));
    if (plan == NULL)
        return (plan_t *)PyErr_NoMemory();
    plan->rows = rows;
    plan->form = answer_form;
    plan->batch = find_batch(self, owner);
    if (plan->batch == NULL)
        plan->batch = make_batch(owner, most_waiting, series, programs, by_rows);
    if (plan->batch != NULL)
        plan->batch->plans++;
    else
        drop_plan(&plan);
    return plan;
}

static PyObject *keep_plan(fast_path_t *self, int fd, int form, plan_t *plan) {
    lane_t *lane = known_lane(self, fd);
    if (lane != NULL && form >= 0 && form < MAX_FORMS) {
        drop_plan(&lane->plans[form]);
        lane->plans[form] = plan;
        lane->forms = form < lane->forms ? lane->forms : form + 1;
        Py_RETURN_NONE;
    }
    drop_plan(&plan);
    return lane == NULL ? NULL : PyErr_Format(PyExc_ValueError, "form %d, forms have numbers below %d", form, MAX_FORMS);
}

static PyObject *learn(fast_path_t *self, PyObject *arguments) {
    int fd, form, rows;
    unsigned long long answer_form;
    PyObject *batch, *inputs, *outputs, *intact;
    if (!PyArg_ParseTuple(arguments, "iiO!iO!O!KO", &fd, &form, &PyTuple_Type, &batch, &rows, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &outputs, &answer_form, &intact))
        return NULL;
    plan_t *plan = make_plan(self, batch, rows, answer_form);
    if (plan == NULL || read_tensors(inputs, outputs, plan)) {
        drop_plan(&plan);
        return NULL;
    }
    if (intact != Py_None) {
        Py_INCREF(intact);
        plan->intact = intact;
    }
    return keep_plan(self, fd, form, plan);
}

static PyObject *learn_alone(fast_path_t *self, PyObject *arguments) {
    int fd, form, rows;
    unsigned long long answer_form;
    PyObject *batch, *inputs, *outputs, *alone;
    if (!PyArg_ParseTuple(arguments, "iiO!iO!O!KO", &fd, &form, &PyTuple_Type, &batch, &rows, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &outputs, &answer_form, &alone))
        return NULL;
    plan_t *plan = make_plan(self, batch, rows, answer_form);
    if (plan == NULL || read_lone_tensors(inputs, outputs, plan)) {
        drop_plan(&plan);
        return NULL;
    }
    Py_INCREF(alone);
    plan->alone = alone;
    return keep_plan(self, fd, form, plan);
}

static PyObject *forget(fast_path_t *self, PyObject *unused) {
    (void)unused;
    for (lane_t *lane = self->lanes; lane != NULL; lane = lane->next)
        for (int i = 0; i < lane->forms; i++)
            drop_plan(&lane->plans[i]);
    Py_RETURN_NONE;
}

static PyObject *forget_form(fast_path_t *self, PyObject *arguments) {
    int fd, form;
    if (!PyArg_ParseTuple(arguments, "ii", &fd, &form))
        return NULL;
    lane_t *lane = known_lane(self, fd);
    if (lane == NULL)
        return NULL;
    if (form >= 0 && form < MAX_FORMS)
        drop_plan(&lane->plans[form]);
    Py_RETURN_NONE;
}

static PyObject *open_lane(fast_path_t *self, PyObject *arguments) {
    int fd;
    unsigned long long peer;
    PyObject *in_flight, *take_back;
    if (!PyArg_ParseTuple(arguments, "iKO!O", &fd, &peer, &PyDict_Type, &in_flight, &take_back))
        return NULL;
    lane_t *lane = PyMem_Calloc(1, sizeof(lane_t));
    if (lane == NULL)
        return PyErr_NoMemory();
    Py_INCREF(in_flight);
    Py_INCREF(take_back);
    lane->in_flight = in_flight;
    lane->take_back = take_back;
    lane->fd = fd;
    lane->peer = peer;
    lane->filled = DATAGRAM_HEAD;
    lane->next = self->lanes;
    self->lanes = lane;
    Py_RETURN_NONE;
}

static void drop_lane(lane_t *lane) {
    for (int i = 0; i < lane->forms; i++)
        drop_plan(&lane->plans[i]);
    Py_DECREF(lane->in_flight);
    Py_DECREF(lane->take_back);
    PyMem_Free(lane);
}

static PyObject *close_lane(fast_path_t *self, PyObject *arguments) {
    int fd;
    if (!PyArg_ParseTuple(arguments, "i", &fd))
        return NULL;
    for (lane_t **place = &self->lanes; *place != NULL; place = &(*place)->next)
        if ((*place)->fd == fd) {
            lane_t *lane = *place;
            *place = lane->next;
            drop_lane(lane);
            break;
        }
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------------------ arrival */

static int make_room(fast_path_t *self) {
    if (self->count < self->room)
        return 0;
    size_t room = self->room ? 2 * self->room : 64;
    request_t *waiting = PyMem_Realloc(self->waiting, room * sizeof(request_t));
    if (waiting == NULL)
        return -1;
    self->waiting = waiting;
    self->room = room;
    return 0;
}

/* All of a datagram's requests wait here afterwards, and its leases are given back; or, if one is not of a known kind, none. */
static int take_requests(fast_path_t *self, lane_t *lane, const unsigned char *datagram, size_t size, uint64_t now) {
    reader_t reader = {datagram + 1, datagram + size};
    uint64_t records, last_id = 0;
    size_t before = self->count, releases = 0;
    reader_t returned[MAX_RELEASES];
    if (datagram[0] != INLINE_KIND || read_array(&reader, &records))
        return -1;
    for (uint64_t n = 0; n < records; n++) {
        form_submit_t record;
        const unsigned char *start = reader.at;
        if (is_release(&reader)) {
            if (releases == MAX_RELEASES || skip_release(&reader))
                goto refused;
            returned[releases++] = (reader_t){start, reader.at};
            continue;
        }
        if (read_form_submit(&reader, &record) || record.form >= MAX_FORMS)
            goto refused;
        plan_t *plan = lane->plans[record.form];
        /* Ids of a submitter grow. */
        if (plan == NULL || plan->failed || (record.deadline_ns && record.deadline_ns <= now) || record.id <= last_id ||
            in_flight(lane, record.id) || make_room(self))
            goto refused;
        last_id = record.id;
        request_t *request = &self->waiting[self->count];
        uint64_t used = 0;
        for (int i = 0; i < plan->inputs; i++) {
            const input_t *input = &plan->input[i];
            if (input->region != NULL) {
                request->contents[i] = (const unsigned char *)input->region;
                continue;
            }
            if (used >= record.count || record.sizes[used] != input->size || (record.contents[used] == NULL && plan->alone == NULL))
                goto refused;
            request->contents[i] = record.contents[used++];
        }
        if (used != record.count)
            goto refused;
        request->lane = lane;
        request->plan = plan;
        request->id = record.id;
        request->arrived_ns = record.received_ns ? record.received_ns : now;
        request->record = start;
        request->size = (size_t)(reader.at - start);
        self->count++;
    }
    if (reader.at != reader.end)
        goto refused;
    for (size_t n = 0; n < releases; n++)
        if (take_back(lane, returned[n].at, (size_t)(returned[n].end - returned[n].at)))
            goto refused;
    return 0;
refused:
    self->count = before;
    return -1;
}

/* Takes what came on a lane: requests, until there is no more, and for Python the datagram that is something else.
 *
 * 0: whatever was there is taken care of.
 */
static int take(fast_path_t *self, lane_t *lane, PyObject *events, PyObject *datagrams) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } ancillary;
    while (lane->used + MAX_DATAGRAM + 1 <= RECEIVED) {
        unsigned char *datagram = lane->received + lane->used;
        struct iovec part = {datagram, MAX_DATAGRAM + 1};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
        ssize_t size = recvmsg(lane->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (size < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (size <= 0)
            return append(events, Py_BuildValue("ii", lane->fd, (int)EPOLLIN));
        int cut = message.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
        if (cut || message.msg_controllen || take_requests(self, lane, datagram, (size_t)size, now_ns()))
            return append(datagrams, Py_BuildValue("i(y#NO)", lane->fd, (const char *)datagram, (Py_ssize_t)size,
                                                   descriptors(&message), cut ? Py_True : Py_False));
        /* Of one without requests nothing is kept. */
        if (self->count)
            lane->used += (size_t)size;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------------ answers */

/* Gives what waits to Python, as datagrams of the lanes that it came from. */
static int give_back(fast_path_t *self, PyObject *datagrams) {
    int wrong = 0;
    for (lane_t *lane = self->lanes; lane != NULL && !wrong; lane = lane->next) {
        size_t size = DATAGRAM_HEAD;
        uint64_t records = 0;
        for (size_t i = self->first; i < self->count; i++)
            if (self->waiting[i].lane == lane) {
                size += self->waiting[i].size;
                records++;
            }
        lane->used = 0;
        if (records == 0)
            continue;
        unsigned char *datagram = PyMem_Malloc(size);
        if (datagram == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        unsigned char *at = datagram;
        write_datagram_head(at, records);
        at += DATAGRAM_HEAD;
        for (size_t i = self->first; i < self->count; i++)
            if (self->waiting[i].lane == lane) {
                memcpy(at, self->waiting[i].record, self->waiting[i].size);
                at += self->waiting[i].size;
            }
        wrong = append(datagrams, Py_BuildValue("i(y#NO)", lane->fd, (const char *)datagram, (Py_ssize_t)size, PyList_New(0), Py_False));
        PyMem_Free(datagram);
    }
    self->first = self->count = 0;
    return wrong;
}

static int give_unsent(fast_path_t *self, PyObject *unsent) {
    for (lane_t *lane = self->lanes; lane != NULL; lane = lane->next) {
        if (!lane->unsent)
            continue;
        lane->unsent = 0;
        PyObject *datagram = Py_BuildValue("iy#", lane->fd, (const char *)lane->answer, (Py_ssize_t)lane->filled);
        lane->filled = DATAGRAM_HEAD;
        lane->answers = 0;
        if (append(unsent, datagram))
            return -1;
    }
    return 0;
}

/* ``moments``: begun, gathered, computed, answered. */
static void count_run(batch_t *batch, const request_t *requests, int count, int rows, const uint64_t moments[4]) {
    figures_t *figures = &batch->figures;
    uint64_t runs = batch->series ? (uint64_t)count : 1;
    size_figures_t *size = &figures->sizes[batch->series ? 1 : rows];
    for (int n = 0; n < count; n++) {
        uint64_t arrived = requests[n].arrived_ns;
        figures->request_ns += moments[3] > arrived ? moments[3] - arrived : 0;
        /* One that arrived while this began has not waited. */
        figures->queue_ns += moments[0] > arrived ? moments[0] - arrived : 0;
        figures->copied += requests[n].plan->copied;
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
    if (count == 1) {
        figures->single_runs++;
        figures->single_ns += moments[2] - moments[1];
    }
}

/* The requests at the head that can share a run: how many, and for how many rows. NULL: that is Python's affair. */
static const program_t *choose(const fast_path_t *self, int *count, int *rows) {
    const request_t *requests = &self->waiting[self->first];
    const batch_t *batch = requests->plan->batch;
    size_t left = self->count - self->first;
    int together = 0, number = 0;
    while ((size_t)number < left && requests[number].plan->batch == batch && together + requests[number].plan->rows <= batch->most)
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

static void set_state(fast_path_t *self, uint64_t state, uint64_t now) {
    self->page[0] = state;
    self->page[1] = now;
    self->page[2] = now;
}

/* Calls what runs these requests; ``moments``: see count_run. */
static PyObject *execute(fast_path_t *self, const request_t *requests, int count, PyObject *call, PyObject *argument, uint64_t moments[4]) {
    _Atomic uint64_t *desk = self->page + self->desk;
    for (int n = 0; n < count; n++) {
        desk[1 + 2 * n] = requests[n].lane->peer;
        desk[2 + 2 * n] = requests[n].id;
    }
    /* Written before and cleared after, so that a batch that kills this process is known by its requests. */
    desk[0] = (uint64_t)count;
    moments[1] = now_ns();
    set_state(self, self->executing, moments[1]);
    PyObject *made = PyObject_CallFunctionObjArgs(call, argument, NULL);
    moments[2] = now_ns();
    desk[0] = 0;
    set_state(self, self->idle, moments[2]);
    return made;
}

/* A run or its answers went wrong: 1, or an error of the process. */
static int give_up(const request_t *requests, int count) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Clear();
    /* Whose fault it was is known of regions only. */
    int found = 0;
    for (int n = 0; n < count; n++)
        found |= requests[n].plan->failed;
    for (int n = 0; n < count && !found; n++)
        requests[n].plan->failed = 1;
    return 1;
}

/* Runs the large request at the head, which is run by itself. Returns as ``run``. */
static int run_alone(fast_path_t *self) {
    const request_t *request = &self->waiting[self->first];
    const batch_t *batch = request->plan->batch;
    /* Those that can share a run are gathered, by Python. */
    int shared = self->first + 1 < self->count && request[1].plan->batch == batch && batch->most > request->plan->rows;
    if (shared || !has_room(request, 1))
        return 1;
    uint64_t moments[4] = {now_ns()}, copied = 0;
    PyObject *places = places_of(request, &copied);
    PyObject *made = places == NULL ? NULL : execute(self, request, 1, request->plan->alone, places, moments);
    Py_XDECREF(places);
    int outcome = made == Py_None ? 1 : made == NULL || answer_alone(request, made) ? give_up(request, 1) : 0;
    Py_XDECREF(made);
    if (outcome == 0) {
        moments[3] = now_ns();
        count_run(request->plan->batch, request, 1, request->plan->rows, moments);
        request->plan->batch->figures.copied += copied;
        self->first++;
        /* The processor is others' beside large tensors. */
        self->together = FEW + 1;
    }
    return outcome;
}

/* Runs the requests at the head that can share a run. 1: they are Python's affair.  -1: an error of the process. */
static int run(fast_path_t *self) {
    const request_t *requests = &self->waiting[self->first];
    if (requests->plan->alone != NULL)
        return run_alone(self);
    int count, rows;
    const program_t *program = choose(self, &count, &rows);
    if (program == NULL || !has_room(requests, count))
        return 1;
    uint64_t moments[4] = {now_ns()};
    gather(program, requests, count, rows);
    PyObject *made = execute(self, requests, count, program->run, NULL, moments);
    int wrong = made == NULL || answer(requests, count, made);
    Py_XDECREF(made);
    if (wrong)
        return give_up(requests, count);
    moments[3] = now_ns();
    count_run(requests->plan->batch, requests, count, rows, moments);
    self->first += (size_t)count;
    return 0;
}

static int too_many(const fast_path_t *self) {
    for (size_t i = 0; i < self->count; i++)
        if (self->count > self->waiting[i].plan->batch->most_waiting)
            return 1;
    return 0;
}

static int flush_all(fast_path_t *self) {
    int unsent = 0;
    for (lane_t *lane = self->lanes; lane != NULL; lane = lane->next) {
        flush(lane);
        unsent |= lane->unsent;
    }
    return unsent;
}

/* Runs what waits, and sends the answers. */
static int serve(fast_path_t *self, PyObject *datagrams) {
    uint64_t began = now_ns();
    self->together = self->count;
    /* Whether a queue takes so many is not decided here. */
    int outcome = too_many(self);
    while (outcome == 0 && self->first < self->count) {
        /* After a long run Python looks what else has come before the next one. */
        if (self->first > 0 && self->waiting[self->first].plan->alone != NULL && now_ns() - began > RUN_ON_NS)
            break;
        outcome = run(self);
        if (outcome == 0 && (self->count - self->first < MANY || now_ns() - began > RUN_ON_NS))
            outcome = flush_all(self);
    }
    flush_all(self);
    return outcome < 0 || give_back(self, datagrams) ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------------------------ waiting */

static int sleep_until(int epoll, struct epoll_event *ready, uint64_t until) {
    uint64_t now = now_ns(), left = until > now ? until - now : 0;
    int milliseconds = (int)((left + 999999) / 1000000);
    if (left > 0 && left < SHORT_NS) {
        struct pollfd one = {epoll, POLLIN, 0};
        struct timespec wait = {0, (long)left};
        if (ppoll(&one, 1, &wait, NULL) < 0)
            return -1;
        milliseconds = 0;
    }
    return epoll_wait(epoll, ready, MAX_EVENTS, milliseconds);
}

/* Looks for events for a moment before it sleeps, as shm/spin.py decides. */
static int poll_until(fast_path_t *self, struct epoll_event *ready, uint64_t until) {
    uint64_t since = now_ns(), look = 0, now = since;
    int found = 0;
    if (self->worth && self->together <= FEW && 2 * (since - self->ended) <= self->look_ns)
        look = since + self->look_ns < until ? since + self->look_ns : until;
    while (now < look && (found = epoll_wait(self->epoll, ready, MAX_EVENTS, 0)) == 0) {
        sched_yield();
        now = now_ns();
    }
    if (found == 0)
        found = sleep_until(self->epoll, ready, until);
    self->ended = now_ns();
    if (until > since)
        self->worth = self->ended - since < self->look_ns;
    return found;
}

static PyObject *wait_for(fast_path_t *self, PyObject *arguments) {
    unsigned long long timeout;
    int fast;
    if (!PyArg_ParseTuple(arguments, "Kp", &timeout, &fast))
        return NULL;
    PyObject *events = PyList_New(0), *datagrams = PyList_New(0), *unsent = PyList_New(0);
    int wrong = events == NULL || datagrams == NULL || unsent == NULL;
    uint64_t until = now_ns() + timeout;
    while (!wrong) {
        struct epoll_event ready[MAX_EVENTS];
        int found;
        Py_BEGIN_ALLOW_THREADS
        found = poll_until(self, ready, until);
        Py_END_ALLOW_THREADS
        if (found < 0 && errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            wrong = 1;
        } else if (found < 0) {
            wrong = PyErr_CheckSignals();
        }
        for (int i = 0; i < found && !wrong; i++) {
            /* In order: what came behind something that is Python's affair is Python's affair as well. */
            int mine = fast && ready[i].events == EPOLLIN && PyList_Size(events) == 0;
            lane_t *lane = mine ? find_lane(self, ready[i].data.fd) : NULL;
            wrong = lane != NULL ? take(self, lane, events, datagrams)
                                 : append(events, Py_BuildValue("iI", ready[i].data.fd, ready[i].events));
        }
        if (!wrong && self->count)
            wrong = serve(self, datagrams);
        wrong = wrong || give_unsent(self, unsent);
        uint64_t now = now_ns();
        self->page[2] = now;
        if (PyList_Size(events) || PyList_Size(datagrams) || PyList_Size(unsent) || now >= until)
            break;
    }
    if (!wrong)
        return Py_BuildValue("NNN", events, datagrams, unsent);
    Py_XDECREF(events);
    Py_XDECREF(datagrams);
    Py_XDECREF(unsent);
    return NULL;
}

static PyObject *figures(fast_path_t *self, PyObject *unused) {
    (void)unused;
    PyObject *found = PyList_New(0);
    for (lane_t *lane = self->lanes; found != NULL && lane != NULL; lane = lane->next)
        for (int i = 0; i < lane->forms && found != NULL; i++)
            if (lane->plans[i] != NULL && lane->plans[i]->batch->figures.answered && append(found, take_figures(lane->plans[i]->batch)))
                Py_CLEAR(found);
    return found;
}

/* --------------------------------------------------------------------------------------------------------------------- type */

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    int epoll;
    unsigned long long look_ns, idle, executing;
    Py_ssize_t desk;
    PyObject *page;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "iKOnKK", &epoll, &look_ns, &page, &desk, &idle, &executing))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    fast_path_t *self = (fast_path_t *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(page, &self->page_buffer, PyBUF_WRITABLE) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (desk < 0 || (size_t)self->page_buffer.len < ((size_t)desk + 1 + 2 * MAX_ROWS) * sizeof(uint64_t)) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "that is no status page");
        return NULL;
    }
    self->page = self->page_buffer.buf;
    self->epoll = epoll;
    self->look_ns = look_ns;
    self->desk = (size_t)desk;
    self->idle = idle;
    self->executing = executing;
    return (PyObject *)self;
}

static PyObject *close_all(fast_path_t *self, PyObject *unused) {
    (void)unused;
    while (self->lanes != NULL) {
        lane_t *lane = self->lanes;
        self->lanes = lane->next;
        drop_lane(lane);
    }
    PyBuffer_Release(&self->page_buffer);
    self->page = NULL;
    Py_RETURN_NONE;
}

static void destroy(fast_path_t *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(close_all(self, NULL));
    PyMem_Free(self->waiting);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"open", (PyCFunction)open_lane, METH_VARARGS, "(fd, peer, in_flight, take_back): a lane; its descriptor is in the epoll."},
    {"close", (PyCFunction)close_lane, METH_VARARGS, "(fd): that lane is gone."},
    {"learn", (PyCFunction)learn, METH_VARARGS,
     "(fd, form, batch, rows, inputs, outputs, answer_form, intact): requests of that form are run here."},
    {"learn_alone", (PyCFunction)learn_alone, METH_VARARGS,
     "(fd, form, batch, rows, inputs, outputs, answer_form, alone): the same of large ones, each of which is run by itself."},
    {"forget", (PyCFunction)forget, METH_NOARGS, "No form is run here any more."},
    {"forget_form", (PyCFunction)forget_form, METH_VARARGS, "(fd, form): that form is not run here any more."},
    {"wait", (PyCFunction)wait_for, METH_VARARGS,
     "(timeout_ns, fast): events, datagrams and unsent answers that are Python's affair; meanwhile serves what is known."},
    {"figures", (PyCFunction)figures, METH_NOARGS, "What was done for each batch since the last call."},
    {"release", (PyCFunction)close_all, METH_NOARGS, "Lets go of everything; only to be called last."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, destroy},
    {Py_tp_methods, methods},
    {Py_tp_doc, "(epoll_fd, look_ns, page, desk, idle, executing): see workers/fast_path.py."},
    {0, NULL},
};

static PyType_Spec spec = {"workers._fast_path.FastPath", sizeof(fast_path_t), 0, Py_TPFLAGS_DEFAULT, slots};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "workers._fast_path", "Turns of a worker's loop outside of Python.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fast_path(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObjectRef(module, "FastPath", type) || PyModule_AddIntMacro(module, MAX_TENSORS) ||
        PyModule_AddIntMacro(module, MAX_ROWS))
        Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
