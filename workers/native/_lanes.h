/* The lanes of the fast path: one submitter's socket each, the datagrams of this turn, and the answers that have not left.
 *
 *     received   | kind | FormSubmit | ... | kind | FormSubmit | ... |     requests point into it until they are answered or given back
 *     answer     | kind | FormCompletion | ... |                           sent when it is full or the turn ends
 */

#ifndef TENSORD_LANES_H
#define TENSORD_LANES_H

#include <errno.h>
#include <sys/socket.h>
#include <time.h>

#include "_plans.h"

/* Datagrams of one turn, together: another one is received as long as it is sure to have room. */
#define RECEIVED (4 * (MAX_DATAGRAM + 1))

typedef struct lane {
    struct lane *next;
    int fd;
    /* The answers could not be sent. */
    int unsent;
    uint64_t peer;
    /* The ids of Python's requests; what takes a datagram of leases that are given back. */
    PyObject *in_flight, *take_back;
    plan_t *plans[MAX_FORMS];
    /* One more than the highest form that ever had one. */
    int forms;
    size_t filled;
    uint64_t answers;
    /* Of ``received``, by datagrams whose requests wait. */
    size_t used;
    /* Of the requests that wait, the highest. */
    uint64_t last_id;
    unsigned char received[RECEIVED], answer[MAX_DATAGRAM];
} lane_t;

typedef struct {
    lane_t *lane;
    plan_t *plan;
    uint64_t id, arrived_ns;
    const unsigned char *record;
    size_t size;
    /* Of its sequence. */
    reader_t sequence;
    int start, end;
    const unsigned char *contents[MAX_TENSORS];
} request_t;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int append(PyObject *list, PyObject *item) {
    int wrong = item == NULL || PyList_Append(list, item);
    Py_XDECREF(item);
    return wrong;
}

/* The descriptors that came with a datagram, as a list; whoever gets it owns them. */
static PyObject *descriptors(struct msghdr *message) {
    PyObject *found = PyList_New(0);
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); found != NULL && each != NULL; each = CMSG_NXTHDR(message, each)) {
        if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = 0; at + sizeof(int) <= each->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd;
            memcpy(&fd, CMSG_DATA(each) + at, sizeof fd);
            if (append(found, PyLong_FromLong(fd)))
                Py_CLEAR(found);
        }
    }
    return found;
}

/* 1: in flight already, or that cannot be told. */
static int in_flight(lane_t *lane, uint64_t id) {
    if (PyDict_Size(lane->in_flight) == 0)
        return 0;
    PyObject *key = PyLong_FromUnsignedLongLong(id);
    int found = key == NULL ? -1 : PyDict_Contains(lane->in_flight, key);
    Py_XDECREF(key);
    if (found < 0)
        PyErr_Clear();
    return found != 0;
}

/* Sends a lane's answers. What the socket does not take now is kept; see ``give_unsent``. */
static void flush(lane_t *lane) {
    if (lane->answers == 0 || lane->unsent)
        return;
    write_datagram_head(lane->answer, lane->answers);
    ssize_t sent = send(lane->fd, lane->answer, lane->filled, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == EINTR)) {
        lane->unsent = 1;
        return;
    }
    /* A peer that is gone swallows everything. */
    lane->filled = DATAGRAM_HEAD;
    lane->answers = 0;
}

static void write_regions(const request_t *request, const Py_buffer *stacks, int row) {
    const plan_t *plan = request->plan;
    for (int i = 0; i < plan->outputs; i++) {
        const output_t *output = &plan->output[i];
        if (output->region != NULL)
            memcpy(output->region, (const char *)stacks[output->stack].buf + output->start + (size_t)row * output->step, output->size);
    }
}

static void write_answer(const request_t *request, const Py_buffer *stacks, int row) {
    lane_t *lane = request->lane;
    const plan_t *plan = request->plan;
    unsigned char *at = lane->answer + lane->filled;
    at = write_form_completion(at, request->id, plan->form, plan->inside, 0);
    for (int i = 0; i < plan->outputs; i++) {
        const output_t *output = &plan->output[i];
        if (output->region != NULL)
            continue;
        at = write_bin_head(at, output->size);
        memcpy(at, (const char *)stacks[output->stack].buf + output->start + (size_t)row * output->step, output->size);
        at += output->size;
    }
    lane->filled = (size_t)(at - lane->answer);
    lane->answers++;
}

/* Whether regions that these requests use lost no page meanwhile. Whose did has failed, and nobody beside it. */
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

/* Whether a run made what the answers of so many rows are cut from. */
static int holds(const plan_t *plan, const Py_buffer *stacks, Py_ssize_t count, int row) {
    for (int i = 0; i < plan->outputs; i++) {
        const output_t *output = &plan->output[i];
        if (output->stack >= count || output->start + (size_t)row * output->step + output->size > (size_t)stacks[output->stack].len)
            return 0;
    }
    return 1;
}

/* Answers with what a run made. 0: answered; else nothing was. */
static int answer(const request_t *requests, int count, PyObject *made) {
    Py_buffer stacks[MAX_TENSORS];
    Py_ssize_t open = 0, given = PyList_Size(made);
    int wrong = given < 0 || given > MAX_TENSORS, row = 0;
    while (!wrong && open < given) {
        wrong = PyObject_GetBuffer(PyList_GetItem(made, open), &stacks[open], PyBUF_SIMPLE);
        open += !wrong;
    }
    for (int n = 0; n < count && !wrong; row += requests[n++].plan->rows)
        wrong = !holds(requests[n].plan, stacks, given, row);
    row = 0;
    for (int n = 0; n < count && !wrong; row += requests[n++].plan->rows)
        write_regions(&requests[n], stacks, row);
    /* After the last byte was read and written: what was missing meanwhile makes the answers void. */
    wrong = wrong || !intact(requests, count);
    row = 0;
    for (int n = 0; n < count && !wrong; row += requests[n++].plan->rows)
        write_answer(&requests[n], stacks, row);
    while (open-- > 0)
        PyBuffer_Release(&stacks[open]);
    return wrong;
}

/* Whether the answers of all of them have room behind those that wait to be sent. */
static int has_room(const request_t *requests, int count) {
    size_t size = 0;
    for (int n = 0; n < count; n++)
        size += requests[n].plan->answer_size;
    for (int n = 0; n < count; n++) {
        lane_t *lane = requests[n].lane;
        if (lane->filled + size > MAX_DATAGRAM)
            flush(lane);
        if (lane->unsent || size > MAX_ANSWER)
            return 0;
    }
    return 1;
}

#endif
