/* What comes on lanes: requests wait here, and everything else goes to Python untouched.
 *
 *     datagram ─▶ every record known ─▶ leases given back, requests wait ─▶ run (_runs.h)
 *              └▶ anything else                                          └▶ given back to Python, as a datagram
 */

#ifndef TENSORD_ARRIVALS_H
#define TENSORD_ARRIVALS_H

#include <stdatomic.h>
#include <sys/epoll.h>

#include "_lone_runs.h"
#include "_spin.h"

/* Records of leases that are given back, in one datagram. */
#define MAX_RELEASES 8

typedef struct {
    PyObject_HEAD
    int epoll;
    spin_t spin;
    /* When the last wait ended. */
    uint64_t ended;
    /* Of the last requests that were served so many came together. */
    size_t together;
    _Atomic uint64_t *page;
    Py_buffer page_buffer;
    size_t desk;
    uint64_t idle, executing;
    lane_t *lanes;
    request_t *waiting;
    size_t first, count, room;
    /* An id came that may wait already: whether it does is Python's affair, so nothing that waits is run. */
    int doubtful;
    /* Called when the answers of sequences have left; whether any were given since; and whether Python has something to send. */
    PyObject *left;
    int sequenced, leave;
} fast_path_t;

static lane_t *find_lane(fast_path_t *self, int fd) {
    lane_t *lane = self->lanes;
    while (lane != NULL && lane->fd != fd)
        lane = lane->next;
    return lane;
}

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
    uint64_t records, last_id = lane->used ? lane->last_id : 0;
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
        /* Ids of a submitter grow, but for those of requests that another worker had before. */
        if (record.id <= last_id)
            self->doubtful = 1;
        if (plan == NULL || plan->failed || record.trace || (record.deadline_ns && record.deadline_ns <= now) ||
            record.id <= last_id || in_flight(lane, record.id) || make_room(self))
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
        request->sequence = record.sequence;
        request->start = record.start;
        request->end = record.end;
        self->count++;
    }
    if (reader.at != reader.end)
        goto refused;
    if (releases) {
        int closed = take_back(lane, returned, releases);
        if (closed < 0)
            goto refused;
        self->leave |= closed;
    }
    lane->last_id = last_id;
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
            return append(datagrams, Py_BuildValue("i(y#Ni)", lane->fd, (const char *)datagram, (Py_ssize_t)size,
                                                   descriptors(&message), cut));
        /* Of one without requests nothing is kept. */
        if (self->count)
            lane->used += (size_t)size;
    }
    return 0;
}

/* Gives what waits to Python, as datagrams of the lanes that it came from: before those that came behind it. */
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
        PyObject *given = Py_BuildValue("i(y#Ni)", lane->fd, (const char *)datagram, (Py_ssize_t)size, PyList_New(0), 0);
        wrong = given == NULL || PyList_Insert(datagrams, 0, given);
        Py_XDECREF(given);
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
        /* No format with '#': built with the headers of 3.13 it is refused by earlier Pythons. */
        PyObject *content = PyBytes_FromStringAndSize((const char *)lane->answer, (Py_ssize_t)lane->filled);
        PyObject *datagram = Py_BuildValue("iN", lane->fd, content);
        lane->filled = DATAGRAM_HEAD;
        lane->answers = 0;
        if (append(unsent, datagram))
            return -1;
    }
    return 0;
}

#endif
