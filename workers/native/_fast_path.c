/* Serves known requests without Python's loop: they are received, run and answered here.
 *
 *     epoll ─▶ datagram of RequestRecords ─▶ small: gathered into a program's memory ─▶ program.run (Python, XLA) ─▶ AnswerRecords
 *           │                          └▶ large: plan->alone (Python, XLA), where their tensors lie           ─▶
 *           └▶ anything else is handed to Python, which does it the ordinary way; and what waits for others to share its run is, too,
 *              whenever Python is to look
 *
 * It learns from Python (workers/dispatch/fast_path.py): a plan for each number of a lane, and the programs that can run it. None
 * of that can change while ``wait`` runs: whatever could change it comes as an event, and ``wait`` returns with the first event, or
 * datagram, that has no plan. What it hands to Python it has not touched.
 *
 * When to poll before sleeping is decided by shm/spin.py, once for each wait, unless there is no polling.
 */

#include "_native.h"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#define MAX_EVENTS 256
/* epoll_wait counts in milliseconds; shorter waits are made by ppoll, which counts in nanoseconds. */
#define SHORT_NS 50000000

/* ------------------------------------------------------------------------------------------------- what Python tells and asks */

/* Returns a lane, or NULL with a KeyError. */
static lane_t *known_lane(fast_path_t *self, int fd) {
    lane_t *lane = find_lane(self, fd);
    if (lane == NULL)
        PyErr_Format(PyExc_KeyError, "descriptor %d is no lane", fd);
    return lane;
}

/* Returns the batch that other plans of the same owner have, or NULL. */
static batch_t *find_batch(fast_path_t *self, PyObject *owner) {
    batch_t *batch = self->batches;
    while (batch != NULL && batch->owner != owner)
        batch = batch->next;
    return batch;
}

/* Makes a plan without its tensors. ``given``: Batch of _native.pyi. */
static plan_t *make_plan(fast_path_t *self, PyObject *given, int rows, unsigned long long answer_number) {
    PyObject *owner = PyTuple_GetItem(given, 0);
    if (owner == NULL)
        return NULL;
    plan_t *plan = PyMem_Calloc(1, sizeof(plan_t));
    if (plan == NULL)
        return (plan_t *)PyErr_NoMemory();
    plan->rows = rows;
    plan->number = answer_number;
    plan->batch = find_batch(self, owner);
    if (plan->batch == NULL)
        plan->batch = make_batch(&self->batches, given);
    if (plan->batch != NULL)
        plan->batch->plans++;
    else
        drop_plan(&plan);
    return plan;
}

/* Returns a table of pointers with room for that index, the new ones NULL, or NULL with an exception. ``count``: its room; first 16. */
static void *grown(void *table, size_t *count, size_t index) {
    size_t room = *count ? *count : 16;
    while (room <= index)
        room *= 2;
    void **made = room == *count ? table : PyMem_Realloc(table, room * sizeof(void *));
    if (made == NULL)
        return PyErr_NoMemory();
    memset(made + *count, 0, (room - *count) * sizeof(void *));
    *count = room;
    return made;
}

/* Takes the plan over and returns None, or drops it and raises. */
static PyObject *keep_plan(fast_path_t *self, int fd, int number, plan_t *plan) {
    lane_t *lane = known_lane(self, fd);
    if (lane != NULL && (number < 0 || number >= TENSORD_MAX_NUMBERS)) {
        PyErr_Format(PyExc_ValueError, "number %d, numbers are below %d", number, TENSORD_MAX_NUMBERS);
        lane = NULL;
    }
    plan_t **plans = lane == NULL ? NULL : grown(lane->plans, &lane->numbers, (size_t)number);
    if (plans == NULL) {
        drop_plan(&plan);
        return NULL;
    }
    lane->plans = plans;
    drop_plan(&lane->plans[number]);
    lane->plans[number] = plan;
    Py_RETURN_NONE;
}

/* Reads what follows the moments in timelines, or None. Not 0: an exception is set. */
static int read_traced(PyObject *traced, plan_t *plan) {
    if (traced == Py_None)
        return 0;
    Py_ssize_t size = PyBytes_Size(traced);
    if (size < 0)
        return -1;
    /* Where it would not fit into an answer, traced requests are Python's. */
    plan->timeline_size = TIMELINE_SIZE + (size_t)size;
    if (plan->answer_size + plan->timeline_size > MAX_ANSWER)
        return 0;
    Py_INCREF(traced);
    plan->traced = traced;
    return 0;
}

/* Reads the parameter sets that requests may name, or None. Not 0: an exception is set. */
static int read_sets(PyObject *sets, plan_t *plan) {
    if (sets == Py_None)
        return 0;
    if (!PyDict_Check(sets))
        return refuse("parameter sets that are no dict");
    Py_INCREF(sets);
    plan->sets = sets;
    return 0;
}

/* Returns a new reference, or NULL for None. */
static PyObject *unless_none(PyObject *given) {
    PyObject *found = given == Py_None ? NULL : given;
    Py_XINCREF(found);
    return found;
}

static PyObject *learn(fast_path_t *self, PyObject *arguments) {
    int fd, number, rows;
    unsigned long long answer_number;
    PyObject *batch, *inputs, *outputs, *intact, *traced, *sets, *alone = Py_None;
    if (!PyArg_ParseTuple(arguments, "iiO!iO!O!KOOO|O", &fd, &number, &PyTuple_Type, &batch, &rows, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &outputs, &answer_number, &intact, &traced, &sets, &alone))
        return NULL;
    plan_t *plan = make_plan(self, batch, rows, answer_number);
    if (plan == NULL)
        return NULL;
    plan->intact = unless_none(intact);
    plan->alone = unless_none(alone);
    if (read_tensors(inputs, outputs, plan) || read_traced(traced, plan) || read_sets(sets, plan)) {
        drop_plan(&plan);
        return NULL;
    }
    return keep_plan(self, fd, number, plan);
}

static PyObject *forget(fast_path_t *self, PyObject *unused) {
    (void)unused;
    for (lane_t *lane = self->lanes; lane != NULL; lane = lane->next)
        for (size_t i = 0; i < lane->numbers; i++)
            drop_plan(&lane->plans[i]);
    Py_RETURN_NONE;
}

static PyObject *forget_number(fast_path_t *self, PyObject *arguments) {
    int fd, number;
    if (!PyArg_ParseTuple(arguments, "ii", &fd, &number))
        return NULL;
    lane_t *lane = known_lane(self, fd);
    if (lane == NULL)
        return NULL;
    if (number >= 0 && (size_t)number < lane->numbers)
        drop_plan(&lane->plans[number]);
    Py_RETURN_NONE;
}

static PyObject *open_lane(fast_path_t *self, PyObject *arguments) {
    int fd, protocol;
    unsigned long long peer, most;
    PyObject *in_flight, *take_back;
    if (!PyArg_ParseTuple(arguments, "iKO!OKi", &fd, &peer, &PyDict_Type, &in_flight, &take_back, &most, &protocol))
        return NULL;
    if (fd < 0)
        return PyErr_Format(PyExc_ValueError, "that is no descriptor");
    lane_t **by_descriptor = grown(self->by_descriptor, &self->descriptors, (size_t)fd);
    if (by_descriptor == NULL)
        return NULL;
    self->by_descriptor = by_descriptor;
    if (protocol < 0 || protocol >= PROTOCOLS)
        return PyErr_Format(PyExc_ValueError, "protocol %d, there are %d", protocol, PROTOCOLS);
    if (self->by_descriptor[fd] != NULL)
        return PyErr_Format(PyExc_ValueError, "descriptor %d is a lane already", fd);
    lane_t *lane = PyMem_Calloc(1, sizeof(lane_t));
    if (lane == NULL)
        return PyErr_NoMemory();
    Py_INCREF(in_flight);
    Py_INCREF(take_back);
    lane->in_flight = in_flight;
    lane->take_back = take_back;
    lane->path = self;
    lane->fd = fd;
    lane->peer = peer;
    lane->most = most;
    lane->protocol = protocol;
    lane->previous = &self->lanes;
    lane->next = self->lanes;
    if (lane->next != NULL)
        lane->next->previous = &lane->next;
    self->lanes = lane;
    self->by_descriptor[fd] = lane;
    Py_RETURN_NONE;
}

static void drop_lane(lane_t *lane) {
    *lane->previous = lane->next;
    if (lane->next != NULL)
        lane->next->previous = lane->previous;
    lane->path->by_descriptor[lane->fd] = NULL;
    for (size_t i = 0; i < lane->numbers; i++)
        drop_plan(&lane->plans[i]);
    give_up_answers(lane);
    PyMem_Free(lane->plans);
    Py_DECREF(lane->in_flight);
    Py_DECREF(lane->take_back);
    PyMem_Free(lane);
}

static PyObject *close_lane(fast_path_t *self, PyObject *arguments) {
    int fd;
    if (!PyArg_ParseTuple(arguments, "i", &fd))
        return NULL;
    lane_t *lane = find_lane(self, fd);
    if (lane != NULL)
        drop_lane(lane);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------------------ waiting */

/* Returns as epoll_wait. */
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

/* Asks shm/spin.py until when to poll. 0: not at all. An exception is set: that went wrong. */
static uint64_t poll_until(fast_path_t *self, uint64_t now) {
    PyObject *answer = PyObject_CallFunction(self->spin_begin, "KK", (unsigned long long)now, (unsigned long long)(now - self->ended));
    uint64_t until = answer == NULL ? 0 : PyLong_AsUnsignedLongLong(answer);
    Py_XDECREF(answer);
    return until;
}

/* Polls, then sleeps until ``until``. Returns as epoll_wait; runs without the interpreter's lock. */
static int poll_and_sleep(fast_path_t *self, struct epoll_event *ready, uint64_t polling, uint64_t until) {
    int found = 0;
    for (uint64_t now = now_ns(); now < polling && (found = epoll_wait(self->epoll, ready, MAX_EVENTS, 0)) == 0; now = now_ns())
        sched_yield();
    if (found == 0)
        found = sleep_until(self->epoll, ready, until);
    return found;
}

/* Waits for events until ``until``. Returns as epoll_wait, or -1 with an exception. ``sleeps``: without polling first. */
static int wait_until(fast_path_t *self, struct epoll_event *ready, uint64_t until, int sleeps) {
    uint64_t now = now_ns(), polling = 0;
    int found, failure, asks = until > now && self->spin_begin != NULL;
    if (asks) {
        polling = poll_until(self, now);
        if (PyErr_Occurred())
            return -1;
    }
    if (sleeps || self->together > FEW)
        polling = 0;
    Py_BEGIN_ALLOW_THREADS
    found = poll_and_sleep(self, ready, polling < until ? polling : until, until);
    failure = errno;
    Py_END_ALLOW_THREADS
    self->ended = now_ns();
    if (asks) {
        PyObject *ended = PyObject_CallFunction(self->spin_end, "K", (unsigned long long)self->ended);
        if (ended == NULL)
            return -1;
        Py_DECREF(ended);
    }
    errno = failure;
    return found;
}

static PyObject *wait_for(fast_path_t *self, PyObject *arguments) {
    unsigned long long timeout;
    int fast, sleeps = 0;
    if (!PyArg_ParseTuple(arguments, "Kp|p", &timeout, &fast, &sleeps))
        return NULL;
    PyObject *events = PyList_New(0), *datagrams = PyList_New(0), *unsent = PyList_New(0);
    int wrong = events == NULL || datagrams == NULL || unsent == NULL;
    uint64_t until = now_ns() + timeout;
    while (!wrong) {
        struct epoll_event ready[MAX_EVENTS];
        int found;
        if (timeout == 0) {
            /* This is quicker than getting the interpreter's lock back where another thread runs. */
            found = epoll_wait(self->epoll, ready, MAX_EVENTS, 0);
        } else {
            found = wait_until(self, ready, self->count && self->due_ns < until ? self->due_ns : until, sleeps);
        }
        if (found < 0 && PyErr_Occurred()) {
            wrong = 1;
        } else if (found < 0 && errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            wrong = 1;
        } else if (found < 0) {
            wrong = PyErr_CheckSignals();
        }
        self->doubtful = self->leave = 0;
        for (int i = 0; i < found && !wrong; i++) {
            /* Order is kept: whatever comes after an event for Python is for Python too. */
            int mine = fast && ready[i].events == EPOLLIN && PyList_Size(events) == 0;
            lane_t *lane = mine ? find_lane(self, ready[i].data.fd) : NULL;
            wrong = lane != NULL ? take(self, lane, events, datagrams)
                                 : append(events, Py_BuildValue("iI", ready[i].data.fd, ready[i].events));
        }
        if (!wrong && self->count)
            wrong = serve(self, datagrams);
        wrong = give_unsent(self, wrong ? NULL : unsent);
        count_held(self);
        uint64_t now = now_ns();
        self->page[PAGE_BEAT] = now;
        if (PyList_Size(events) || PyList_Size(datagrams) || PyList_Size(unsent) || self->leave || now >= until)
            break;
    }
    /* Whatever makes Python look may concern what still waits. */
    if (!wrong && self->count)
        wrong = give_back(self, datagrams);
    if (!wrong)
        return Py_BuildValue("NNN", events, datagrams, unsent);
    Py_XDECREF(events);
    Py_XDECREF(datagrams);
    Py_XDECREF(unsent);
    return NULL;
}

/* Returns and clears what was counted of each batch. */
static PyObject *figures(fast_path_t *self, PyObject *unused) {
    (void)unused;
    PyObject *found = PyList_New(0);
    for (batch_t *batch = self->batches; found != NULL && batch != NULL; batch = batch->next)
        if (batch->figures.answered && append(found, take_figures(batch)))
            Py_CLEAR(found);
    return found;
}

static PyObject *lane_requests(fast_path_t *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->lane_requests);
}

static PyObject *let_pass(fast_path_t *self, PyObject *arguments) {
    unsigned long long most;
    if (!PyArg_ParseTuple(arguments, "Kp", &most, &self->joins))
        return NULL;
    self->pass_until = self->lane_requests + most;
    Py_RETURN_NONE;
}

/* --------------------------------------------------------------------------------------------------------------------- type */

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    int epoll;
    unsigned long long idle, executing;
    Py_ssize_t slot;
    PyObject *spin, *page, *left;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "iOOnKKO", &epoll, &spin, &page, &slot, &idle, &executing, &left))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    fast_path_t *self = (fast_path_t *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(page, &self->page_buffer, PyBUF_WRITABLE) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (slot < 0 || (size_t)self->page_buffer.len < ((size_t)slot + SLOT_SINCE + 1) * sizeof(uint64_t)) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "that is no status page");
        return NULL;
    }
    self->page = self->page_buffer.buf;
    self->received = PyMem_Malloc(ALL_RECEIVED);
    if (self->received == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->epoll = epoll;
    self->slot = (size_t)slot;
    self->idle = idle;
    self->executing = executing;
    self->pass_until = UINT64_MAX;
    Py_INCREF(left);
    self->left = left;
    if (spin != Py_None) {
        self->spin_begin = PyObject_GetAttrString(spin, "begin");
        self->spin_end = PyObject_GetAttrString(spin, "end");
        if (self->spin_begin == NULL || self->spin_end == NULL)
            Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static PyObject *close_all(fast_path_t *self, PyObject *unused) {
    (void)unused;
    while (self->lanes != NULL)
        drop_lane(self->lanes);
    while (self->spare != NULL) {
        answers_t *spare = self->spare;
        self->spare = spare->next;
        PyMem_Free(spare);
    }
    PyBuffer_Release(&self->page_buffer);
    self->page = NULL;
    Py_CLEAR(self->left);
    Py_CLEAR(self->spin_begin);
    Py_CLEAR(self->spin_end);
    Py_RETURN_NONE;
}

static void destroy(fast_path_t *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(close_all(self, NULL));
    PyMem_Free(self->waiting);
    PyMem_Free(self->received);
    PyMem_Free(self->kept);
    PyMem_Free(self->by_descriptor);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"open", (PyCFunction)open_lane, METH_VARARGS,
     "(fd, peer, in_flight, take_back, most, protocol): adds a lane, whose descriptor is in the epoll."},
    {"close", (PyCFunction)close_lane, METH_VARARGS, "(fd): forgets a lane."},
    {"learn", (PyCFunction)learn, METH_VARARGS,
     "(fd, number, batch, rows, inputs, outputs, answer_number, intact, traced, sets, alone): runs requests with that number from now on."},
    {"forget", (PyCFunction)forget, METH_NOARGS, "Forgets all plans."},
    {"forget_number", (PyCFunction)forget_number, METH_VARARGS, "(fd, number): forgets its plan."},
    {"wait", (PyCFunction)wait_for, METH_VARARGS,
     "(timeout_ns, fast, sleeps): serves what is known; returns events, datagrams and unsent answers that are for Python."},
    {"figures", (PyCFunction)figures, METH_NOARGS, "Returns what was counted of each batch since the last call."},
    {"lane_requests", (PyCFunction)lane_requests, METH_NOARGS, "Counts requests of clients' lanes that were served here, ever."},
    {"let_pass", (PyCFunction)let_pass, METH_VARARGS, "(most, joins): serves so many further requests of clients' lanes; gives Python each after them, and with joins each of a trace."},
    {"release", (PyCFunction)close_all, METH_NOARGS, "Lets go of everything; to be called last."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, destroy},
    {Py_tp_methods, methods},
    {Py_tp_doc, "(epoll_fd, spin, page, slot, idle, executing, left): see workers/dispatch/fast_path.py."},
    {0, NULL},
};

PyType_Spec fast_path_spec = {"tensord.workers.native._native.FastPath", sizeof(fast_path_t), 0, Py_TPFLAGS_DEFAULT, slots};
