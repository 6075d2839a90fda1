/* Receives datagrams: requests that can be run here wait, and everything else goes to Python untouched.
 *
 *     datagram ─▶ every record known ─▶ leases released, requests wait ─▶ run (_runs.c)
 *              │                     └▶ traced requests that are Python's ╮
 *              └▶ anything else                                           ┴▶ handed to Python, as a datagram
 */

#include "_native.h"

#include <sys/epoll.h>

/* Records of released leases in one datagram. */
#define MAX_RELEASES 8

/* Returns the lane of a descriptor, or NULL. */
lane_t *find_lane(fast_path_t *self, int fd) {
    return fd >= 0 && (size_t)fd < self->descriptors ? self->by_descriptor[fd] : NULL;
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

/* Returns what ``wait`` says of a datagram: (descriptor of the lane, (content, descriptors, flags)). Takes ``content`` and ``fds`` over. */
static PyObject *for_python(const lane_t *lane, PyObject *content, PyObject *fds, int flags) {
    return Py_BuildValue("i(NNi)", lane->fd, content, fds, flags);
}

/* Returns a datagram of records as bytes, or NULL with an exception. ``parts``: where they lie, some with the record before them. */
static PyObject *datagram_of(const tensord__reader *parts, size_t count, uint64_t records) {
    size_t size = DATAGRAM_HEAD;
    for (size_t i = 0; i < count; i++)
        size += (size_t)(parts[i].end - parts[i].at);
    PyObject *datagram = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (datagram == NULL)
        return NULL;
    tensord__writer to = tensord__write_to(PyBytes_AsString(datagram), size);
    tensord__put_wide_datagram(&to, records);
    for (size_t i = 0; i < count; i++)
        tensord__put(&to, parts[i].at, (size_t)(parts[i].end - parts[i].at));
    return datagram;
}

/* Releases leases, whose records have come. Returns 0: done; 1: done, and Python has to tell the peer that a segment is closed;
 * -1: none was released. Sets no exception. */
static int take_back(lane_t *lane, const tensord__reader *records, size_t count) {
    PyObject *datagram = datagram_of(records, count, count);
    PyObject *taken = datagram == NULL ? NULL : PyObject_CallFunctionObjArgs(lane->take_back, datagram, NULL);
    Py_XDECREF(datagram);
    int closed = taken == NULL ? -1 : PyObject_IsTrue(taken);
    if (closed < 0)
        PyErr_Clear();
    Py_XDECREF(taken);
    return closed;
}

/* Makes all requests of a datagram wait here, or sets them aside, and releases its leases. Not 0: there is something else in it, and nothing was done.
 * Sets no exception. */
static int take_requests(fast_path_t *self, lane_t *lane, const unsigned char *datagram, size_t size, uint64_t now) {
    tensord__reader reader = tensord__read_from(datagram + 1, size - 1);
    uint64_t records = tensord__take_array(&reader), last_id = lane->waits ? lane->last_id : 0, waits = lane->waits;
    size_t before = self->count, releases = 0;
    tensord__reader returned[MAX_RELEASES];
    if (datagram[0] != TENSORD_WHOLE || reader.bad)
        return -1;
    for (uint64_t n = 0; n < records; n++) {
        const unsigned char *start = reader.at;
        uint64_t fields = tensord__take_array(&reader);
        tensord__text tag = tensord__take_text(&reader);
        size_t context = 0;
        if (tensord__is(tag, "tc")) {
            /* It belongs to the request behind it. */
            tensord__take_trace_context(&reader, fields);
            if ((lane->most && self->joins) || ++n == records)
                goto refused;
            context = (size_t)(reader.at - start);
            fields = tensord__take_array(&reader);
            tag = tensord__take_text(&reader);
        } else if (tensord__is(tag, "L")) {
            tensord__take_release(&reader);
            if (releases == MAX_RELEASES || fields != 2 || reader.bad)
                goto refused;
            returned[releases++] = tensord__read_from(start, (size_t)(reader.at - start));
            continue;
        }
        if (!tensord__is(tag, "q"))
            goto refused;
        tensord__request record = tensord__take_request(&reader, fields);
        const tensord__own *own = &record.own;
        /* What replaces a waiting request, or may be replaced, is Python's: it has the queue. Priority and timeout change nothing for
         * what is run here: there is one queue, and nothing waits for a slot. */
        if (reader.bad || record.number >= TENSORD_MAX_NUMBERS || own->replace_key.size || own->sequence_text.size > MAX_SEQUENCE_ID ||
            own->parameter_set.size > MAX_SET_NAME)
            goto refused;
        plan_t *plan = record.number < lane->numbers ? lane->plans[record.number] : NULL;
        /* The ids of a submitter grow, except those of requests that another worker had before. A client's doubt is its own: by the time
         * that Python sees this datagram, what waits here is answered. */
        if (record.request_id <= last_id && lane->most == 0)
            self->doubtful = 1;
        if (plan == NULL || plan->failed || (lane->most && own->trace & ~(uint64_t)TENSORD_TIMING) || own->strikes ||
            (own->deadline_ns && (plan->batch->delay_ns || own->deadline_ns <= now)) || record.request_id <= last_id ||
            in_flight(lane, record.request_id) || make_room(self))
            goto refused;
        PyObject *set;
        if (find_set(plan, own->parameter_set, &set))
            goto refused;
        if (lane->most && (waits + (uint64_t)PyDict_Size(lane->in_flight) >= lane->most || self->lane_requests + self->count >= self->pass_until))
            goto refused;
        waits++;
        last_id = record.request_id;
        request_t *request = &self->waiting[self->count];
        uint64_t used = 0;
        for (int i = 0; i < plan->inputs; i++) {
            const input_t *input = &plan->input[i];
            if (input->region != NULL) {
                request->contents[i] = (const unsigned char *)input->region;
                continue;
            }
            if (used++ >= record.count)
                goto refused;
            tensord__content content = tensord__take_content(&record.contents);
            if (content.byte_size != input->size || (content.bytes == NULL && plan->alone == NULL))
                goto refused;
            request->contents[i] = content.bytes;
        }
        if (used != record.count)
            goto refused;
        int traced = (own->trace & ~(uint64_t)TENSORD_TIMING) != 0;
        if (traced && (set != NULL || plan->traced == NULL || own->trace & ~(uint64_t)(TENSORD_TIMING | TIMESTAMPS))) {
            /* Steps of a sequence keep their order. */
            if (plan->batch->choose != NULL || self->set_aside == MAX_ASIDE)
                goto refused;
            self->aside[self->set_aside++] = tensord__read_from(start, (size_t)(reader.at - start));
            continue;
        }
        request->lane = lane;
        request->plan = plan;
        request->set = set;
        request->id = record.request_id;
        request->arrived_ns = own->received_ns && !lane->most ? own->received_ns : now;
        request->queued_ns = traced ? now : 0;
        request->timed = (own->trace & TENSORD_TIMING) != 0;
        request->record = start;
        request->context = context;
        request->size = (size_t)(reader.at - start);
        request->sequence_text = own->sequence_text;
        request->sequence_id = own->sequence_id;
        request->start = own->sequence_start;
        request->end = own->sequence_end;
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
    lane->waits = waits;
    return 0;
refused:
    self->count = before;
    self->set_aside = 0;
    return -1;
}

/* Returns the requests that were set aside as a datagram for Python, or NULL with an exception. */
static PyObject *aside_for_python(fast_path_t *self, const lane_t *lane) {
    uint64_t records = 0;
    for (size_t i = 0; i < self->set_aside; i++)
        records += 1 + (uint64_t)tensord__comes(&self->aside[i], "tc");
    PyObject *datagram = datagram_of(self->aside, self->set_aside, records);
    self->set_aside = 0;
    return for_python(lane, datagram, PyList_New(0), 0);
}

/* Counts a lane among those that something came from in this iteration. */
void activate(fast_path_t *self, lane_t *lane) {
    if (lane->active)
        return;
    lane->active = 1;
    lane->next_active = self->active;
    self->active = lane;
}

/* Receives from a lane until nothing is left, or until a datagram is for Python. Not 0: an exception is set. */
int take(fast_path_t *self, lane_t *lane, PyObject *events, PyObject *datagrams) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } ancillary;
    size_t most = self->used + RECEIVED < ALL_RECEIVED ? self->used + RECEIVED : ALL_RECEIVED;
    activate(self, lane);
    for (int n = 0; n < MAX_DATAGRAMS && self->used + TENSORD_MAX_DATAGRAM + 1 <= most; n++) {
        unsigned char *datagram = self->received + self->used;
        struct iovec part = {datagram, TENSORD_MAX_DATAGRAM + 1};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
        ssize_t size = recvmsg(lane->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (size < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        /* An empty datagram reads as the other end's close, whatever came with it. */
        if (size <= 0 && !(size == 0 && message.msg_controllen))
            return append(events, Py_BuildValue("ii", lane->fd, (int)EPOLLIN));
        int cut = message.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
        if (cut || message.msg_controllen || take_requests(self, lane, datagram, (size_t)size, now_ns()))
            return append(datagrams, for_python(lane, PyBytes_FromStringAndSize((const char *)datagram, size), descriptors(&message), cut));
        /* A datagram is kept while its requests wait. */
        if (self->count)
            self->used += (size_t)size;
        if (self->set_aside)
            return append(datagrams, aside_for_python(self, lane));
    }
    return 0;
}

/* Puts the requests of one lane, from that one on, into a datagram for Python. Returns NULL with an exception. */
static PyObject *repacked(const fast_path_t *self, const lane_t *lane) {
    size_t count = 0;
    uint64_t records = 0;
    tensord__reader *parts = PyMem_Malloc((self->count - self->first) * sizeof(tensord__reader));
    if (parts == NULL)
        return PyErr_NoMemory();
    for (size_t i = lane->handed; i > 0; i = self->waiting[i - 1].next) {
        const request_t *request = &self->waiting[i - 1];
        parts[count++] = tensord__read_from(request->record, request->size);
        records += request->context ? 2 : 1;
    }
    PyObject *datagram = datagram_of(parts, count, records);
    PyMem_Free(parts);
    return for_python(lane, datagram, PyList_New(0), 0);
}

/* Copies the records of held requests, so that others can be received to where they lie. Not 0: they are too many bytes, or there is no
 * memory, and nothing was done. Sets no exception. */
int keep_held(fast_path_t *self) {
    size_t used = 0;
    for (size_t i = 0; i < self->count; i++)
        used += self->waiting[i].size;
    if (used > RECEIVED || (self->kept == NULL && (self->kept = PyMem_Malloc(ALL_RECEIVED)) == NULL))
        return -1;
    unsigned char *at = self->kept;
    for (size_t i = 0; i < self->count; i++) {
        request_t *request = &self->waiting[i];
        const unsigned char *from = request->record, *end = from + request->size;
        memcpy(at, from, request->size);
        for (int n = 0; n < request->plan->inputs; n++)
            if (request->contents[n] >= from && request->contents[n] < end)
                request->contents[n] = at + (request->contents[n] - from);
        request->record = at;
        at += request->size;
    }
    unsigned char *free = self->received;
    self->received = self->kept;
    self->kept = free;
    self->used = used;
    return 0;
}

/* Counts the requests that wait beyond this iteration for their lanes. */
void count_held(fast_path_t *self) {
    for (size_t i = 0; i < self->count; i++)
        self->waiting[i].lane->waits = 0;
    for (size_t i = 0; i < self->count; i++) {
        lane_t *lane = self->waiting[i].lane;
        if (lane->waits++ == 0 || self->waiting[i].id > lane->last_id)
            lane->last_id = self->waiting[i].id;
    }
}

/* Hands what waits to Python, as datagrams of the lanes that it came from, before those that came later. */
int give_back(fast_path_t *self, PyObject *datagrams) {
    int wrong = 0;
    for (size_t i = self->count; i > self->first; i--) {
        request_t *request = &self->waiting[i - 1];
        request->next = request->lane->handed;
        request->lane->handed = i;
    }
    for (size_t i = self->first; i < self->count; i++) {
        lane_t *lane = self->waiting[i].lane;
        if (lane->handed && !wrong) {
            PyObject *given = repacked(self, lane);
            wrong = given == NULL || PyList_Insert(datagrams, 0, given);
            Py_XDECREF(given);
        }
        lane->handed = 0;
    }
    for (size_t i = self->first; i < self->count; i++)
        self->waiting[i].lane->waits = 0;
    self->first = self->count = self->used = 0;
    return wrong;
}

/* Ends the iteration of the lanes that something came from. Answers that their sockets did not take are handed to Python, as a datagram for
 * each lane. ``unsent``: NULL where an exception is set already. */
int give_unsent(fast_path_t *self, PyObject *unsent) {
    int wrong = unsent == NULL;
    while (self->active != NULL) {
        lane_t *lane = self->active;
        self->active = lane->next_active;
        if (lane->unsent && !wrong) {
            PyObject *content = PyBytes_FromStringAndSize((const char *)lane->answer->content, (Py_ssize_t)lane->filled);
            wrong = append(unsent, Py_BuildValue("iN", lane->fd, content));
        }
        give_up_answers(lane);
        lane->unsent = lane->active = 0;
        lane->waits = 0;
    }
    return wrong;
}
