/* Receives datagrams: requests that can be run here wait, and everything else goes to Python untouched.
 *
 *     datagram ─▶ every record known ─▶ leases released, requests wait ─▶ run (_runs.c)
 *              └▶ anything else                                        └▶ handed to Python, as a datagram
 */

#include "_native.h"

#include <sys/epoll.h>

/* Records of released leases in one datagram. */
#define MAX_RELEASES 8

/* Returns the lane of a descriptor, or NULL. */
lane_t *find_lane(fast_path_t *self, int fd) {
    lane_t *lane = self->lanes;
    while (lane != NULL && lane->fd != fd)
        lane = lane->next;
    return lane;
}

/* Makes room for one more waiting request. Sets no exception: without room the datagram is for Python. */
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

/* Returns a list of the descriptors that came with a datagram; the caller owns them. */
static PyObject *descriptors(struct msghdr *message) {
    PyObject *found = PyList_New(0);
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); found != NULL && each != NULL; each = CMSG_NXTHDR(message, each)) {
        if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = 0; found != NULL && at + sizeof(int) <= each->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd;
            memcpy(&fd, CMSG_DATA(each) + at, sizeof fd);
            if (append(found, PyLong_FromLong(fd)))
                Py_CLEAR(found);
        }
    }
    return found;
}

/* Returns what ``wait`` says of a datagram: (descriptor of the lane, (content, descriptors, flags)). Takes ``fds`` over.
 *
 * No format with '#': one that was compiled with the headers of Python 3.13 is refused by earlier Pythons. */
static PyObject *for_python(const lane_t *lane, const unsigned char *content, size_t size, PyObject *fds, int flags) {
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)content, (Py_ssize_t)size);
    return Py_BuildValue("i(NNi)", lane->fd, bytes, fds, flags);
}

/* Makes all requests of a datagram wait here, and releases its leases. Not 0: there is something else in it, and nothing was done.
 * Sets no exception. */
static int take_requests(fast_path_t *self, lane_t *lane, const unsigned char *datagram, size_t size, uint64_t now) {
    reader_t reader = {datagram + 1, datagram + size};
    uint64_t records, last_id = lane->used ? lane->last_id : 0;
    size_t before = self->count, releases = 0;
    reader_t returned[MAX_RELEASES];
    if (datagram[0] != INLINE_KIND || read_array(&reader, &records))
        return -1;
    for (uint64_t n = 0; n < records; n++) {
        request_record_t record;
        const unsigned char *start = reader.at;
        if (is_release(&reader)) {
            if (releases == MAX_RELEASES || skip_release(&reader))
                goto refused;
            returned[releases++] = (reader_t){start, reader.at};
            continue;
        }
        if (read_request_record(&reader, &record) || record.number >= MAX_NUMBERS)
            goto refused;
        plan_t *plan = lane->plans[record.number];
        /* The ids of a submitter grow, except those of requests that another worker had before. */
        if (record.id <= last_id)
            self->doubtful = 1;
        if (plan == NULL || plan->failed || record.trace || record.strikes || (record.deadline_ns && record.deadline_ns <= now) ||
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

/* Receives from a lane until nothing is left, or until a datagram is for Python. Not 0: an exception is set. */
int take(fast_path_t *self, lane_t *lane, PyObject *events, PyObject *datagrams) {
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
            return append(datagrams, for_python(lane, datagram, (size_t)size, descriptors(&message), cut));
        /* A datagram is kept while its requests wait. */
        if (self->count)
            lane->used += (size_t)size;
    }
    return 0;
}

/* Hands what waits to Python, as datagrams of the lanes that it came from, before those that came later. */
int give_back(fast_path_t *self, PyObject *datagrams) {
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
        PyObject *given = for_python(lane, datagram, size, PyList_New(0), 0);
        wrong = given == NULL || PyList_Insert(datagrams, 0, given);
        Py_XDECREF(given);
        PyMem_Free(datagram);
    }
    self->first = self->count = 0;
    return wrong;
}

/* Hands answers to Python that sockets did not take, as a datagram for each lane. */
int give_unsent(fast_path_t *self, PyObject *unsent) {
    for (lane_t *lane = self->lanes; lane != NULL; lane = lane->next) {
        if (!lane->unsent)
            continue;
        lane->unsent = 0;
        PyObject *content = PyBytes_FromStringAndSize((const char *)lane->answer, (Py_ssize_t)lane->filled);
        PyObject *datagram = Py_BuildValue("iN", lane->fd, content);
        lane->filled = DATAGRAM_HEAD;
        lane->answers = 0;
        if (append(unsent, datagram))
            return -1;
    }
    return 0;
}
