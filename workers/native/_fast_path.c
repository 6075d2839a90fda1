/* The turns of a worker's loop in which nothing happens but requests of known forms: received, run and answered here.
 *
 *     epoll ─▶ datagram of FormSubmits ─▶ small: gathered into a program's memory ─▶ program.run (Python, XLA) ─▶ FormCompletions
 *           │                          └▶ large: plan->alone (Python, XLA), where their tensors lie           ─▶
 *           └▶ anything else is given back to Python, which does it the ordinary way
 *
 * What is known is said by Python (workers/dispatch/fast_path.py): a plan for each form of a lane, and the programs that can run it. Nothing
 * of that can change while ``wait`` runs, because all that could change it comes as an event, and with the first other event, or
 * anything in a datagram that has no plan, ``wait`` returns. What it gives back it has not touched.
 *
 * The status page is written as shm/status_page.py does. Records are in _records.h, what is known in _plans.h, sockets in _lanes.h, what
 * comes in _arrivals.h, which sequences go on in _sequences.h, what is done with all of that in _runs.h.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "_runs.h"

#define MAX_EVENTS 64
/* epoll counts in milliseconds; shorter waits are counted in nanoseconds. */
#define SHORT_NS 50000000

/* ------------------------------------------------------------------------------------------------------------- what is known */

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
    unsigned long long model, most_waiting;
    int series;
    PyObject *owner, *programs, *by_rows, *sequences;
    if (!PyArg_ParseTuple(given, "OKKpO!O!O", &owner, &model, &most_waiting, &series, &PyTuple_Type, &programs, &PyTuple_Type, &by_rows,
                          &sequences))
        return NULL;
    plan_t *plan = PyMem_Calloc(1, sizeof(plan_t));
    if (plan == NULL)
        return (plan_t *)PyErr_NoMemory();
    plan->rows = rows;
    plan->form = answer_form;
    plan->batch = find_batch(self, owner);
    if (plan->batch == NULL)
        plan->batch = make_batch(owner, model, most_waiting, series, programs, by_rows, sequences);
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

typedef int (*read_t)(PyObject *inputs, PyObject *outputs, plan_t *plan);

/* A plan with its tensors; ``call``: the last of the arguments. */
static plan_t *read_plan(fast_path_t *self, PyObject *arguments, read_t read, int *fd, int *form, PyObject **call) {
    int rows;
    unsigned long long answer_form;
    PyObject *batch, *inputs, *outputs;
    if (!PyArg_ParseTuple(arguments, "iiO!iO!O!KO", fd, form, &PyTuple_Type, &batch, &rows, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &outputs, &answer_form, call))
        return NULL;
    plan_t *plan = make_plan(self, batch, rows, answer_form);
    if (plan != NULL && read(inputs, outputs, plan))
        drop_plan(&plan);
    return plan;
}

static PyObject *learn(fast_path_t *self, PyObject *arguments) {
    int fd, form;
    PyObject *intact;
    plan_t *plan = read_plan(self, arguments, read_tensors, &fd, &form, &intact);
    if (plan == NULL)
        return NULL;
    if (intact != Py_None) {
        Py_INCREF(intact);
        plan->intact = intact;
    }
    return keep_plan(self, fd, form, plan);
}

static PyObject *learn_alone(fast_path_t *self, PyObject *arguments) {
    int fd, form;
    PyObject *alone;
    plan_t *plan = read_plan(self, arguments, read_lone_tensors, &fd, &form, &alone);
    if (plan == NULL)
        return NULL;
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

/* Looks for events for a moment before it sleeps (_spin.h). */
static int poll_until(fast_path_t *self, struct epoll_event *ready, uint64_t until, int sleeps) {
    uint64_t since = now_ns(), look = 0, now = since;
    int found = 0;
    if (until > since)
        look = spin_begin(&self->spin, since, since - self->ended);
    if (look > until)
        look = until;
    if (sleeps)
        look = 0;
    while (now < look && self->together <= FEW && (found = epoll_wait(self->epoll, ready, MAX_EVENTS, 0)) == 0)
        now = spin_give_way();
    if (found == 0)
        found = sleep_until(self->epoll, ready, until);
    self->ended = now_ns();
    if (until > since)
        spin_end(&self->spin, self->ended);
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
            /* It takes less than to get Python's lock again where another thread is at work. */
            found = epoll_wait(self->epoll, ready, MAX_EVENTS, 0);
        } else {
            Py_BEGIN_ALLOW_THREADS
            found = poll_until(self, ready, until, sleeps);
            Py_END_ALLOW_THREADS
        }
        if (found < 0 && errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            wrong = 1;
        } else if (found < 0) {
            wrong = PyErr_CheckSignals();
        }
        self->doubtful = self->leave = 0;
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
        if (PyList_Size(events) || PyList_Size(datagrams) || PyList_Size(unsent) || self->leave || now >= until)
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
    PyObject *page, *left;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "iKOnKKO", &epoll, &look_ns, &page, &desk, &idle, &executing, &left))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    fast_path_t *self = (fast_path_t *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(page, &self->page_buffer, PyBUF_WRITABLE) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (desk < 0 || (size_t)self->page_buffer.len < ((size_t)desk + DESK_SINCE + 1) * sizeof(uint64_t)) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "that is no status page");
        return NULL;
    }
    self->page = self->page_buffer.buf;
    self->epoll = epoll;
    self->spin.limit_ns = look_ns;
    self->desk = (size_t)desk;
    self->idle = idle;
    self->executing = executing;
    Py_INCREF(left);
    self->left = left;
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
    Py_CLEAR(self->left);
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
    {Py_tp_doc, "(epoll_fd, look_ns, page, desk, idle, executing, left): see workers/dispatch/fast_path.py."},
    {0, NULL},
};

static PyType_Spec spec = {"tensord.workers.native._fast_path.FastPath", sizeof(fast_path_t), 0, Py_TPFLAGS_DEFAULT, slots};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tensord.workers.native._fast_path", "Turns of a worker's loop outside of Python.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fast_path(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObjectRef(module, "FastPath", type) || PyModule_AddStringMacro(module, SOURCES) ||
        PyModule_AddIntMacro(module, MAX_TENSORS) || PyModule_AddIntMacro(module, MAX_ROWS))
        Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
