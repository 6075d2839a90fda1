/* tensord's lane: how a program of this host asks models without copying, in edition TENSORD_WIRE of the wire.
 *
 * This header and tensord_wire.h are the description for every language, and the whole client for C11 and C++17: nothing is linked to
 * them. What they describe must be sent exactly so by other clients; the functions behind it are one that does. Linux only.
 *
 * 1. The clients' socket (clients.sock in $RUNTIME_DIRECTORY, in $XDG_RUNTIME_DIR/tensord or in /tmp/tensord-UID): AF_UNIX,
 *    SOCK_SEQPACKET. A message is a JSON object, requests are answered in order.
 *
 *      {"hello": {}}                           {"server": "tensord", "version": "...", "wire": TENSORD_WIRE, "lanes": true, "http": [...]}
 *      {"open": {"model": "m", "version": 0,   {"model": "m", "version": 3, "metadata": {...}, "max_batch_size": 8, "streams": false,
 *        "ended": [17], "wait": 5.0}}           "sequences": false, "pure": true, "lanes": [{"lane": 18, "device": "cpu:0",
 *                                               "new": true}], "limits": {"in_flight": n, "segments": n, "segment_byte_size": n,
 *                                               "response_byte_size": n}, "coming": 0, "spin_us": 300}
 *      anything else                           {"error": "a sentence", "code": "NOT_FOUND"}
 *
 *    version 0 is the newest. "lanes" has one entry for each worker that has the model; the sockets of the new ones come beside the
 *    message (SCM_RIGHTS), in that order. "ended" are lanes whose end the client has seen. The connection owns its lanes: when it is
 *    closed they end. "pure": running a request twice harms nobody. "spin_us": for so long a client may poll a lane before it sleeps.
 *
 * 2. A lane: tensord_wire.h, which lies beside this header, describes its datagrams and records, and reads and writes them.
 *
 * 3. Memory of the client: a memfd sealed with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL. Tensors at multiples of 64 bytes are used where
 *    they lie. The client must not write to inputs, nor read outputs, before the final answer has come. The worker's memory is mapped
 *    read-only; what a lease covers stays as it is until the client gives it back.
 *
 * 4. A client must never wait until it can send without receiving meanwhile: a worker whose answers are not taken takes no requests. What is
 *    malformed ends the lane. After the end of a lane a request may be sent to another worker only if it never left, or is pure.
 */

#ifndef TENSORD_LANE_H
#define TENSORD_LANE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create */
#endif

#include "tensord_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TENSORD_MAX_LANES 64
#define TENSORD_MAX_RANK 16
#define TENSORD_MAX_TENSORS 32
#define TENSORD_MAX_SEGMENTS 64
/* Segments of one worker's memory that are mapped at a time. */
#define TENSORD_MAX_RESPONSES 256
/* Leases are given back with the next request, or once there are so many. */
#define TENSORD_MAX_RELEASES 16

/* Errors that functions return. Their texts are in ``error`` of the lane or the client. */
enum {
    TENSORD_OK = 0,
    /* Malformed, refused, out of memory: see the text. */
    TENSORD_FAILED = -1,
    /* The other end is gone. */
    TENSORD_ENDED = -2,
    /* Nothing came in that time. */
    TENSORD_TIMEOUT = -3,
    /* The worker takes nothing now: receive first, then send again. */
    TENSORD_BUSY = -4
};

/* A place in a segment of the client's own, and where it is here. */
typedef struct {
    uint32_t segment;
    uint64_t offset;
    uint64_t byte_size;
    void *memory;
} tensord_place;

/* A tensor of a request. ``place`` NULL: its bytes travel inside each request. */
typedef struct {
    const char *name;
    const char *datatype;
    int rank;
    const int64_t *shape;
    const tensord_place *place;
} tensord_tensor;

/* An output that is wanted. ``place`` NULL: it comes inside the answer, or in the worker's memory. */
typedef struct {
    const char *name;
    const tensord_place *place;
} tensord_wanted;

/* Bytes of an input without a place. */
typedef struct {
    const void *content;
    size_t byte_size;
} tensord_bytes;

/* An output of an answer. Name and datatype are not terminated by 0. */
typedef struct {
    const char *name;
    size_t name_size;
    const char *datatype;
    size_t datatype_size;
    int rank;
    int64_t shape[TENSORD_MAX_RANK];
    /* NULL: it is in the place that was wanted. Inside an answer it lies at any address, in the worker's memory at a multiple of 64. */
    const void *content;
    uint64_t byte_size;
} tensord_output;

/* An answer. What it points to stays until the next receive, what lies in the worker's memory until the lease is given back. */
typedef struct {
    uint64_t request_id;
    int final;
    int64_t version;
    /* "": the outputs are there. Else the name of an error, and the sentence that goes with it. */
    char code[32];
    char message[512];
    int outputs;
    tensord_output output[TENSORD_MAX_TENSORS];
    int has_lease;
    uint64_t lease[3];
    uint64_t queue_ns, compute_ns, copied_byte_size;
} tensord_answer;

/* The end of a lane. Not for two threads at a time. */
typedef struct {
    int fd;
    int64_t number;
    uint64_t next_id;
    int agreed;
    uint32_t next_segment;
    /* The datagram that was received last, or the record that came in parts. */
    unsigned char received[TENSORD_MAX_DATAGRAM + 1];
    unsigned char *parts;
    size_t parts_size;
    /* The part of it that has not been read yet. */
    const unsigned char *at, *end;
    uint64_t records;
    tensord__waits waits;
    struct {
        int used;
        uint64_t number, byte_size;
        unsigned char *memory;
    } responses[TENSORD_MAX_RESPONSES];
    /* Prepared answers by number, as they came. */
    unsigned char *prepared[TENSORD_MAX_NUMBERS];
    size_t prepared_size[TENSORD_MAX_NUMBERS];
    uint64_t releases[TENSORD_MAX_RELEASES][3];
    int release_count;
    /* The ids of the next request's trace, if it has one. */
    char trace[49];
    int traced;
    /* A request that is to be cancelled before the next one leaves, because the worker took nothing; 0: none. */
    uint64_t late;
    struct {
        void *memory;
        uint64_t byte_size;
    } segments[TENSORD_MAX_SEGMENTS];
    char error[512];
} tensord_lane;

/* The connection to the daemon, which owns the lanes. */
typedef struct {
    int fd;
    tensord_lane *lanes[TENSORD_MAX_LANES];
    int count;
    char error[512];
} tensord_client;

/* ---------------------------------------------------------------------------------------------------------------- JSON */

static inline const char *tensord__json_skip(const char *at, int depth);

static inline const char *tensord__json_space(const char *at) {
    while (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')
        at++;
    return at;
}

static inline const char *tensord__json_text(const char *at) {
    if (*at++ != '"')
        return NULL;
    while (*at != '"') {
        if (*at == 0 || (*at == '\\' && *++at == 0))
            return NULL;
        at++;
    }
    return at + 1;
}

/* Returns where the next value ends, or NULL. */
static inline const char *tensord__json_skip(const char *at, int depth) {
    at = tensord__json_space(at);
    if (*at == '"')
        return tensord__json_text(at);
    if (*at != '{' && *at != '[') {
        const char *begin = at;
        at += strcspn(at, ",]} \n\t\r");
        return at == begin ? NULL : at;
    }
    char close = *at == '{' ? '}' : ']';
    at = tensord__json_space(at + 1);
    while (depth > 0 && *at != close) {
        if (close == '}') {
            if ((at = tensord__json_text(at)) == NULL || *(at = tensord__json_space(at)) != ':')
                return NULL;
            at++;
        }
        if ((at = tensord__json_skip(at, depth - 1)) == NULL)
            return NULL;
        at = tensord__json_space(at);
        if (*at == ',')
            at = tensord__json_space(at + 1);
        else if (*at != close)
            return NULL;
    }
    return depth > 0 ? at + 1 : NULL;
}

/* Returns where a member's value of an object begins, or NULL. */
static inline const char *tensord__json_member(const char *at, const char *name) {
    size_t size = strlen(name);
    at = tensord__json_space(at);
    if (*at != '{')
        return NULL;
    at = tensord__json_space(at + 1);
    while (*at == '"') {
        const char *key = at + 1;
        if ((at = tensord__json_text(at)) == NULL)
            return NULL;
        int found = (size_t)(at - 1 - key) == size && memcmp(key, name, size) == 0;
        at = tensord__json_space(at);
        if (*at++ != ':')
            return NULL;
        if (found)
            return tensord__json_space(at);
        if ((at = tensord__json_skip(at, 64)) == NULL)
            return NULL;
        at = tensord__json_space(at);
        if (*at == ',')
            at = tensord__json_space(at + 1);
    }
    return NULL;
}

static inline int64_t tensord__json_int(const char *object, const char *name, int64_t otherwise) {
    const char *at = tensord__json_member(object, name);
    return at == NULL ? otherwise : strtoll(at, NULL, 10);
}

static inline int tensord__json_true(const char *object, const char *name) {
    const char *at = tensord__json_member(object, name);
    return at != NULL && strncmp(at, "true", 4) == 0;
}

/* ---------------------------------------------------------------------------------------------------- the clients' socket */

/* Makes the header of a message in one part, with room for descriptors. */
static inline struct msghdr tensord__message(struct iovec *part, void *ancillary, size_t room) {
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = ancillary;
    message.msg_controllen = room;
    return message;
}

/* Asks. ``answer`` has room for 128 KiB and a 0; ``fds`` for TENSORD_MAX_LANES. Returns 0, or TENSORD_FAILED or TENSORD_ENDED. */
static inline int tensord__ask(tensord_client *client, const char *question, char *answer, int *fds, int *fd_count) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(TENSORD_MAX_LANES * sizeof(int))];
    } ancillary;
    struct iovec part = {answer, 128 << 10};
    struct msghdr message = tensord__message(&part, &ancillary, sizeof ancillary);
    *fd_count = 0;
    /* A daemon that refuses a connection says why before it closes it. */
    send(client->fd, question, strlen(question), MSG_NOSIGNAL);
    ssize_t size = recvmsg(client->fd, &message, MSG_CMSG_CLOEXEC);
    if (size <= 0) {
        snprintf(client->error, sizeof client->error, "the daemon does not answer: %s", size ? strerror(errno) : "it has closed");
        return TENSORD_ENDED;
    }
    answer[size] = 0;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each != NULL; each = CMSG_NXTHDR(&message, each)) {
        if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = 0; at + sizeof(int) <= each->cmsg_len - CMSG_LEN(0) && *fd_count < TENSORD_MAX_LANES; at += sizeof(int))
            memcpy(&fds[(*fd_count)++], CMSG_DATA(each) + at, sizeof(int));
    }
    const char *error = tensord__json_member(answer, "error");
    if (error == NULL && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
        return 0;
    snprintf(client->error, sizeof client->error, "%.500s", error == NULL ? "the daemon's answer was cut" : error);
    while (*fd_count > 0)
        close(fds[--*fd_count]);
    return TENSORD_FAILED;
}

/* Connects to the daemon's socket for clients. Returns 0, or TENSORD_FAILED: nobody serves there, or not this edition. */
static inline int tensord_connect(tensord_client *client, const char *path) {
    struct sockaddr_un address;
    memset(client, 0, sizeof *client);
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    if (strlen(path) >= sizeof address.sun_path) {
        snprintf(client->error, sizeof client->error, "the path of a socket has at most %zu bytes", sizeof address.sun_path - 1);
        client->fd = -1;
        return TENSORD_FAILED;
    }
    strcpy(address.sun_path, path);
    client->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (client->fd < 0 || connect(client->fd, (struct sockaddr *)&address, sizeof address)) {
        snprintf(client->error, sizeof client->error, "no tensord serves at %.300s: %s", path, strerror(errno));
        return TENSORD_FAILED;
    }
    char *answer = (char *)malloc((128 << 10) + 1);
    int fds[TENSORD_MAX_LANES], count = 0;
    int wrong = answer == NULL ? TENSORD_FAILED : tensord__ask(client, "{\"hello\": {}}", answer, fds, &count);
    if (!wrong && (!tensord__json_true(answer, "lanes") || tensord__json_int(answer, "wire", 0) != TENSORD_WIRE)) {
        snprintf(client->error, sizeof client->error, "the daemon gives no lanes in edition %d of the wire", TENSORD_WIRE);
        wrong = TENSORD_FAILED;
    }
    free(answer);
    return wrong;
}

/* ------------------------------------------------------------------------------------------------------------ sending */

static inline int tensord__fail(tensord_lane *lane, int result, const char *why) {
    snprintf(lane->error, sizeof lane->error, "%s", why);
    return result;
}

/* Sends a datagram, with a descriptor unless that is negative. */
static inline int tensord__send(tensord_lane *lane, const void *content, size_t size, int fd) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int))];
    } ancillary;
    struct iovec part = {(void *)content, size};
    memset(&ancillary, 0, sizeof ancillary);
    struct msghdr message = tensord__message(&part, fd < 0 ? NULL : &ancillary, fd < 0 ? 0 : CMSG_SPACE(sizeof(int)));
    if (fd >= 0) {
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    while (sendmsg(lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        if (errno == EINTR)
            continue;
        if (errno == EAGAIN || errno == ENOBUFS)
            return tensord__fail(lane, TENSORD_BUSY, "the worker takes nothing now");
        return tensord__fail(lane, TENSORD_ENDED, "the worker has ended the lane");
    }
    return 0;
}

/* Begins a datagram with so many records in a buffer. */
static inline tensord__writer tensord__datagram(unsigned char *buffer, size_t room, uint64_t records) {
    tensord__writer to = tensord__write_to(buffer, room);
    tensord__put_datagram(&to, records);
    return to;
}

static inline int tensord__send_written(tensord_lane *lane, const tensord__writer *to, int fd) {
    if (to->full)
        return tensord__fail(lane, TENSORD_FAILED, "a record is larger than a datagram");
    return tensord__send(lane, to->begin, (size_t)(to->at - to->begin), fd);
}

/* Sends a record of numbers alone, with a descriptor unless that is negative. */
static inline int tensord__send_numbers(tensord_lane *lane, const char *tag, uint64_t one, uint64_t other, int count, int fd) {
    unsigned char buffer[64];
    const uint64_t numbers[2] = {one, other};
    tensord__writer to = tensord__datagram(buffer, sizeof buffer, 1);
    tensord__put_numbers(&to, tag, numbers, count);
    return tensord__send_written(lane, &to, fd);
}

static inline void tensord__put_memory(tensord__writer *to, const tensord_place *place) {
    char name[16];
    if (place == NULL) {
        tensord__put_nil(to);
        return;
    }
    snprintf(name, sizeof name, "@%u", (unsigned)place->segment);
    tensord__put_place(to);
    tensord__put_text(to, tensord__text_of(name));
    tensord__put_uint(to, place->offset);
    tensord__put_uint(to, place->byte_size);
}

static inline void tensord__put_releases(tensord__writer *to, const tensord_lane *lane) {
    tensord__put_release(to, (uint64_t)lane->release_count);
    for (int i = 0; i < lane->release_count; i++)
        tensord__put_lease(to, lane->releases[i]);
}

/* Opens a model: a lane to a worker that has it. ``version`` 0: the newest. ``wait``: seconds for one that is being loaded.
 * Returns the lane, which the client owns; NULL: see ``client->error``. The others to that model are in ``client->lanes``. */
static inline tensord_lane *tensord_open(tensord_client *client, const char *model, int64_t version, double wait) {
    char question[1024];
    int fds[TENSORD_MAX_LANES], count = 0, next = 0;
    tensord_lane *chosen = NULL;
    if (strpbrk(model, "\"\\") != NULL || strlen(model) > 512) {
        snprintf(client->error, sizeof client->error, "no model has such a name");
        return NULL;
    }
    snprintf(question, sizeof question, "{\"open\": {\"model\": \"%s\", \"version\": %lld, \"wait\": %.3f}}", model, (long long)version, wait);
    char *answer = (char *)malloc((128 << 10) + 1);
    if (answer == NULL || tensord__ask(client, question, answer, fds, &count)) {
        free(answer);
        return NULL;
    }
    const char *at = tensord__json_member(answer, "lanes");
    at = at == NULL || *at != '[' ? "]" : tensord__json_space(at + 1);
    while (*at == '{') {
        int64_t number = tensord__json_int(at, "lane", -1);
        if (!tensord__json_true(at, "new")) {
            for (int i = 0; i < client->count; i++)
                if (client->lanes[i]->number == number && chosen == NULL)
                    chosen = client->lanes[i];
        } else if (next < count && client->count < TENSORD_MAX_LANES) {
            tensord_lane *lane = (tensord_lane *)calloc(1, sizeof *lane);
            if (lane == NULL)
                break;
            lane->fd = fds[next++];
            lane->number = number;
            lane->waits.limit = 1000 * (uint64_t)tensord__json_int(answer, "spin_us", 0);
            client->lanes[client->count++] = lane;
            if (!tensord__send_numbers(lane, "V", TENSORD_WIRE, 0, 1, -1) && chosen == NULL)
                chosen = lane;
        }
        if ((at = tensord__json_skip(at, 8)) == NULL)
            break;
        at = tensord__json_space(at);
        if (*at == ',')
            at = tensord__json_space(at + 1);
    }
    while (next < count)
        close(fds[next++]);
    free(answer);
    if (chosen == NULL)
        snprintf(client->error, sizeof client->error, "the model has no worker now");
    return chosen;
}

/* Makes a segment of memory that the worker sees as well, and gives ``place`` all of it: zeros, 64-byte aligned. One segment may hold
 * many tensors (``tensord_part``). Returns 0, or an error. */
static inline int tensord_empty(tensord_lane *lane, uint64_t byte_size, tensord_place *place) {
    if (lane->next_segment >= TENSORD_MAX_SEGMENTS || byte_size == 0)
        return tensord__fail(lane, TENSORD_FAILED, "a lane has at most 64 segments, of one byte or more");
    byte_size = (byte_size + 4095) / 4096 * 4096;
    int fd = memfd_create("tensord-client", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return tensord__fail(lane, TENSORD_FAILED, strerror(errno));
    void *memory = MAP_FAILED;
    if (!posix_fallocate(fd, 0, (off_t)byte_size) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        memory = mmap(NULL, byte_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        close(fd);
        return tensord__fail(lane, TENSORD_FAILED, "the host has no memory for a segment");
    }
    int wrong = tensord__send_numbers(lane, "S+", lane->next_segment, byte_size, 2, fd);
    close(fd);
    if (wrong) {
        munmap(memory, byte_size);
        return wrong;
    }
    lane->segments[lane->next_segment].memory = memory;
    lane->segments[lane->next_segment].byte_size = byte_size;
    place->segment = lane->next_segment++;
    place->offset = 0;
    place->byte_size = byte_size;
    place->memory = memory;
    return 0;
}

/* Takes so many bytes off the beginning of a place, and what is behind them up to a multiple of 64. ``memory`` NULL: there are not so many. */
static inline tensord_place tensord_part(tensord_place *from, uint64_t byte_size) {
    tensord_place part = *from;
    uint64_t room = (byte_size + 63) / 64 * 64;
    if (room < byte_size || room > from->byte_size) {
        part.memory = NULL;
        part.byte_size = 0;
        return part;
    }
    part.byte_size = byte_size;
    from->offset += room;
    from->byte_size -= room;
    from->memory = (char *)from->memory + room;
    return part;
}

/* Says what a number (below TENSORD_MAX_NUMBERS) stands for from now on. No outputs: all are wanted. Returns 0, or an error. */
static inline int tensord_prepare(tensord_lane *lane, int number, const char *model, int64_t version, const tensord_tensor *inputs,
                                  int input_count, const tensord_wanted *outputs, int output_count) {
    unsigned char *buffer = (unsigned char *)malloc(TENSORD_MAX_DATAGRAM);
    if (buffer == NULL)
        return tensord__fail(lane, TENSORD_FAILED, "no memory is left");
    tensord__writer to = tensord__datagram(buffer, TENSORD_MAX_DATAGRAM, 1);
    tensord__put_prepare(&to, (uint64_t)number);
    tensord__put_prepared_request(&to);
    tensord__put_text(&to, tensord__text_of(model));
    tensord__put_int(&to, version);
    tensord__put_array(&to, (uint64_t)input_count);
    for (int i = 0; i < input_count; i++) {
        tensord__put_tensor(&to);
        tensord__put_text(&to, tensord__text_of(inputs[i].name));
        tensord__put_text(&to, tensord__text_of(inputs[i].datatype));
        tensord__put_array(&to, (uint64_t)inputs[i].rank);
        for (int j = 0; j < inputs[i].rank; j++)
            tensord__put_int(&to, inputs[i].shape[j]);
        tensord__put_memory(&to, inputs[i].place);
    }
    tensord__put_array(&to, (uint64_t)output_count);
    for (int i = 0; i < output_count; i++) {
        tensord__put_output(&to);
        tensord__put_text(&to, tensord__text_of(outputs[i].name));
        tensord__put_memory(&to, outputs[i].place);
        tensord__put_uint(&to, 0);
    }
    tensord__put_map(&to, 0);
    int wrong = tensord__send_written(lane, &to, -1);
    free(buffer);
    return wrong;
}

/* Says which trace the next request belongs to: 32 and 16 hexadecimal digits of a ``traceparent`` (W3C Trace Context) whose sender samples it. */
static inline void tensord_trace(tensord_lane *lane, const char *trace_id, const char *span_id) {
    lane->traced = snprintf(lane->trace, sizeof lane->trace, "%.32s%.16s", trace_id, span_id) == 48;
}

/* Tells the worker that nobody waits for a request; its last answer comes all the same. Returns 0, or an error. */
static inline int tensord_cancel(tensord_lane *lane, uint64_t request_id) { return tensord__send_numbers(lane, "X", request_id, 0, 1, -1); }

/* Sends a prepared request. ``contents``: the bytes of the inputs without a place, together less than a datagram. ``deadline_ns``: of
 * CLOCK_MONOTONIC; 0: none. Returns 0 and its id, or an error. */
static inline int tensord_send(tensord_lane *lane, int number, const tensord_bytes *contents, int count, uint64_t deadline_ns,
                               uint64_t *request_id) {
    int wrong = lane->late ? tensord_cancel(lane, lane->late) : 0;
    if (wrong)
        return wrong;
    lane->late = 0;
    unsigned char small[2048], *buffer = small;
    size_t room = 1024;
    for (int i = 0; i < count; i++)
        room += contents[i].byte_size + 8;
    if (room > TENSORD_MAX_DATAGRAM)
        return tensord__fail(lane, TENSORD_FAILED, "larger inputs need a place");
    if (room > sizeof small && (buffer = (unsigned char *)malloc(room)) == NULL)
        return tensord__fail(lane, TENSORD_FAILED, "no memory is left");
    tensord__own own;
    memset(&own, 0, sizeof own);
    own.deadline_ns = deadline_ns;
    own.trace = TENSORD_TIMING;
    tensord__writer to = tensord__datagram(buffer, room, (uint64_t)(1 + (lane->release_count > 0) + lane->traced));
    if (lane->release_count)
        tensord__put_releases(&to, lane);
    if (lane->traced) {
        const tensord__text trace_id = {lane->trace, 32}, span_id = {lane->trace + 32, 16};
        tensord__put_trace_context(&to, lane->next_id + 1, trace_id, span_id);
    }
    tensord__put_request(&to, lane->next_id + 1);
    tensord__put_uint(&to, (uint64_t)number);
    tensord__put_array(&to, (uint64_t)count);
    for (int i = 0; i < count; i++)
        tensord__put_bytes(&to, contents[i].content, contents[i].byte_size);
    tensord__put_own(&to, &own);
    wrong = tensord__send_written(lane, &to, -1);
    if (buffer != small)
        free(buffer);
    if (wrong)
        return wrong;
    lane->release_count = lane->traced = 0;
    *request_id = ++lane->next_id;
    return 0;
}

/* Ends a sequence without a request, once those that wait have run. The last one must have been sent on this lane. ``sequence_id`` is a number
 * that is not 0. Returns 0, or an error. */
static inline int tensord_end_sequence(tensord_lane *lane, const char *model, uint64_t sequence_id) {
    unsigned char buffer[1024];
    tensord__writer to = tensord__datagram(buffer, sizeof buffer, 1);
    tensord__put_end_sequence(&to);
    tensord__put_text(&to, tensord__text_of(model));
    tensord__put_uint(&to, sequence_id);
    return tensord__send_written(lane, &to, -1);
}

/* Acknowledges so many bytes of a streaming request's responses. Returns 0, or an error. */
static inline int tensord_taken(tensord_lane *lane, uint64_t request_id, uint64_t byte_size) {
    return tensord__send_numbers(lane, "T", request_id, byte_size, 2, -1);
}

/* Gives back the memory that an answer's outputs lie in; it leaves with the next request, or with others. Returns 0, or an error. */
static inline int tensord_release(tensord_lane *lane, tensord_answer *answer) {
    if (!answer->has_lease)
        return 0;
    if (lane->release_count == TENSORD_MAX_RELEASES) {
        unsigned char buffer[32 + 32 * TENSORD_MAX_RELEASES];
        tensord__writer to = tensord__datagram(buffer, sizeof buffer, 1);
        tensord__put_releases(&to, lane);
        int wrong = tensord__send_written(lane, &to, -1);
        if (wrong)
            return wrong;
        lane->release_count = 0;
    }
    memcpy(lane->releases[lane->release_count++], answer->lease, sizeof answer->lease);
    answer->has_lease = 0;
    return 0;
}

/* ---------------------------------------------------------------------------------------------------------- receiving */

static inline void tensord__close_response(tensord_lane *lane, uint64_t number) {
    for (int i = 0; i < TENSORD_MAX_RESPONSES; i++)
        if (lane->responses[i].used && lane->responses[i].number == number) {
            munmap(lane->responses[i].memory, lane->responses[i].byte_size);
            lane->responses[i].used = 0;
        }
}

/* Maps a segment of the worker's; closes the descriptor. */
static inline int tensord__open_response(tensord_lane *lane, uint64_t number, uint64_t byte_size, int fd) {
    for (int i = 0; fd >= 0 && i < TENSORD_MAX_RESPONSES; i++) {
        if (lane->responses[i].used)
            continue;
        void *memory = mmap(NULL, byte_size, PROT_READ, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED)
            break;
        close(fd);
        lane->responses[i].used = 1;
        lane->responses[i].number = number;
        lane->responses[i].byte_size = byte_size;
        lane->responses[i].memory = (unsigned char *)memory;
        return 0;
    }
    if (fd >= 0)
        close(fd);
    return tensord__fail(lane, TENSORD_FAILED, "a segment of the worker's cannot be mapped");
}

static inline uint64_t tensord__now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Begins a wait: polls for a datagram, giving way to others, before its receiver sleeps. */
static inline void tensord__spin(tensord_lane *lane, uint64_t until_ns) {
    struct pollfd look = {lane->fd, POLLIN, 0};
    uint64_t end = tensord__begin_wait(&lane->waits, tensord__now_ns());
    if (until_ns && until_ns < end)
        end = until_ns;
    while (tensord__now_ns() < end && poll(&look, 1, 0) == 0)
        sched_yield();
}

/* Receives a datagram of records, waiting at most until a moment of CLOCK_MONOTONIC; 0: for ever. ``fd``: what came beside it, or -1. */
static inline int tensord__receive(tensord_lane *lane, uint64_t until_ns, int *fd) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int))];
    } ancillary;
    free(lane->parts);
    lane->parts = NULL;
    lane->parts_size = 0;
    for (;;) {
        struct iovec part = {lane->received, sizeof lane->received};
        struct msghdr message = tensord__message(&part, &ancillary, sizeof ancillary);
        tensord__spin(lane, until_ns);
        if (until_ns) {
            uint64_t now_ns = tensord__now_ns();
            struct pollfd look = {lane->fd, POLLIN, 0};
            int left = until_ns <= now_ns ? 0 : (int)((until_ns - now_ns + 999999) / 1000000 > 1 << 30 ? 1 << 30 : (until_ns - now_ns + 999999) / 1000000);
            int ready = poll(&look, 1, left);
            if (ready == 0)
                return tensord__fail(lane, TENSORD_TIMEOUT, "nothing came in that time");
            if (ready < 0)
                continue;
        }
        ssize_t size = recvmsg(lane->fd, &message, MSG_CMSG_CLOEXEC);
        tensord__end_wait(&lane->waits, tensord__now_ns());
        if (size < 0 && (errno == EINTR || errno == ECONNRESET))
            continue;
        if (size <= 0)
            return tensord__fail(lane, TENSORD_ENDED, "the worker has ended the lane");
        *fd = -1;
        for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each != NULL; each = CMSG_NXTHDR(&message, each))
            if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS)
                memcpy(fd, CMSG_DATA(each), sizeof *fd);
        unsigned char kind = lane->received[0];
        tensord__reader from = tensord__read_from(lane->received + 1, (size_t)size - 1);
        from.bad = kind < TENSORD_WHOLE || kind > TENSORD_LAST_PART || (message.msg_flags & MSG_TRUNC);
        if (!from.bad && (kind != TENSORD_WHOLE || lane->parts != NULL)) {
            /* One byte more than they have: of 0 bytes the parts before would be freed. */
            unsigned char *grown = kind == TENSORD_WHOLE ? NULL : (unsigned char *)realloc(lane->parts, lane->parts_size + (size_t)size);
            if (grown == NULL)
                return tensord__fail(lane, TENSORD_FAILED, "a record came in parts that do not belong together");
            memcpy(grown + lane->parts_size, lane->received + 1, (size_t)size - 1);
            lane->parts = grown;
            lane->parts_size += (size_t)size - 1;
            if (kind == TENSORD_PART)
                continue;
            from.at = grown;
            from.end = grown + lane->parts_size;
        }
        lane->records = tensord__take_array(&from);
        lane->at = from.at;
        lane->end = from.end;
        return from.bad ? tensord__fail(lane, TENSORD_FAILED, "a datagram is malformed") : 0;
    }
}

/* Returns where bytes of the worker's memory are, or NULL: they are in no segment. */
static inline const void *tensord__find(const tensord_lane *lane, const tensord__content *content) {
    for (int i = 0; i < TENSORD_MAX_RESPONSES; i++)
        if (lane->responses[i].used && lane->responses[i].number == content->segment && content->offset <= lane->responses[i].byte_size &&
            content->byte_size <= lane->responses[i].byte_size - content->offset)
            return lane->responses[i].memory + content->offset;
    return NULL;
}

static inline void tensord__copy_text(tensord__text text, char *to, size_t room) { snprintf(to, room, "%.*s", (int)text.size, text.size ? text.at : ""); }

static inline void tensord__read_answer(tensord_lane *lane, tensord__reader *from, uint64_t fields, tensord_answer *answer) {
    tensord__answer read = tensord__take_answer(from, fields);
    if (!from->bad && read.numbered) {
        from->bad = read.number >= TENSORD_MAX_NUMBERS || lane->prepared[read.number] == NULL;
        if (from->bad)
            return;
        tensord__reader known = tensord__read_from(lane->prepared[read.number], lane->prepared_size[read.number]);
        read.prepared = tensord__take_prepared_answer(&known);
    }
    from->bad |= read.count != read.prepared.own || read.prepared.output_count > TENSORD_MAX_TENSORS;
    answer->request_id = read.request_id;
    answer->final = read.prepared.final;
    answer->version = (int64_t)read.prepared.version;
    answer->outputs = from->bad ? 0 : (int)read.prepared.output_count;
    tensord__copy_text(read.code, answer->code, sizeof answer->code);
    tensord__copy_text(read.message, answer->message, sizeof answer->message);
    for (int i = 0; i < answer->outputs && !from->bad; i++) {
        tensord_output *output = &answer->output[i];
        tensord__tensor tensor = tensord__take_tensor(&read.prepared.outputs);
        output->name = tensor.name.at;
        output->name_size = tensor.name.size;
        output->datatype = tensor.datatype.at;
        output->datatype_size = tensor.datatype.size;
        output->rank = (int)tensor.rank;
        from->bad |= tensor.rank > TENSORD_MAX_RANK;
        for (uint64_t j = 0; !from->bad && j < tensor.rank; j++)
            output->shape[j] = tensord__take_int(&tensor.shape);
        output->content = NULL;
        output->byte_size = 0;
        if (tensor.placed)
            continue;
        tensord__content content = tensord__take_content(&read.contents);
        output->byte_size = content.byte_size;
        output->content = content.bytes != NULL ? content.bytes : tensord__find(lane, &content);
        from->bad |= output->content == NULL;
    }
    answer->has_lease = read.has_lease;
    memcpy(answer->lease, read.lease, sizeof answer->lease);
    answer->queue_ns = read.timing[0];
    answer->compute_ns = read.timing[1];
    answer->copied_byte_size = read.timing[2];
}

/* Keeps a prepared answer for the answers that name it. Not 0: there is no memory. */
static inline int tensord__learn(tensord_lane *lane, tensord__reader *from) {
    uint64_t number = tensord__take_uint(from);
    const unsigned char *begin = from->at;
    tensord__take_prepared_answer(from);
    from->bad |= number >= TENSORD_MAX_NUMBERS;
    if (from->bad)
        return 0;
    size_t size = (size_t)(from->at - begin);
    unsigned char *kept = (unsigned char *)realloc(lane->prepared[number], size);
    if (kept == NULL)
        return tensord__fail(lane, TENSORD_FAILED, "no memory is left");
    memcpy(kept, begin, size);
    lane->prepared[number] = kept;
    lane->prepared_size[number] = size;
    return 0;
}

/* Reads the next record. Returns 1: it was an answer; 0: another one; or an error. */
static inline int tensord__read_record(tensord_lane *lane, tensord_answer *answer, int fd) {
    tensord__reader from = tensord__read_from(lane->at, (size_t)(lane->end - lane->at));
    uint64_t fields = tensord__take_array(&from), numbers[2] = {0, 0};
    tensord__text tag = tensord__take_text(&from);
    int is_answer = tensord__is(tag, "c"), wrong = 0;
    if (tensord__is(tag, "V") != !lane->agreed)
        from.bad = 1;
    if (is_answer) {
        tensord__read_answer(lane, &from, fields, answer);
    } else if (tensord__is(tag, "C+") && fields == 3) {
        wrong = tensord__learn(lane, &from);
    } else {
        tensord__take_numbers(&from, tag, fields, numbers);
        if (from.bad)
            wrong = 0;
        else if (tensord__is(tag, "V"))
            from.bad = !(lane->agreed = numbers[0] == TENSORD_WIRE);
        else if (tensord__is(tag, "S+"))
            wrong = tensord__open_response(lane, numbers[0], numbers[1], fd);
        else if (tensord__is(tag, "S-"))
            tensord__close_response(lane, numbers[0]);
        else
            wrong = tensord__fail(lane, TENSORD_FAILED, "the worker could not map a segment");
    }
    lane->at = from.at;
    lane->records--;
    if (from.bad)
        return tensord__fail(lane, TENSORD_FAILED, "a record is malformed");
    return wrong ? wrong : is_answer;
}

/* Receives the next answer, whichever request's it is, until a moment of CLOCK_MONOTONIC; 0: for ever. Returns 0, or an error. */
static inline int tensord_receive(tensord_lane *lane, tensord_answer *answer, uint64_t until_ns) {
    int fd = -1;
    for (;;) {
        while (lane->records) {
            int found = tensord__read_record(lane, answer, fd);
            fd = -1;
            if (found)
                return found > 0 ? 0 : found;
        }
        if (lane->late && !tensord_cancel(lane, lane->late))
            lane->late = 0;
        int wrong = tensord__receive(lane, until_ns, &fd);
        if (wrong)
            return wrong;
    }
}

/* Sends a prepared request and receives its last answer; answers to others, which nobody can take then, are given back. Returns 0 also for an
 * answer with a ``code``, or an error. After TENSORD_TIMEOUT the request is cancelled, before the next one leaves at the latest; the worker may
 * still write to its places, until its answer comes. */
static inline int tensord_call(tensord_lane *lane, int number, const tensord_bytes *contents, int count, uint64_t until_ns,
                               tensord_answer *answer) {
    uint64_t request_id;
    int wrong = tensord_send(lane, number, contents, count, until_ns, &request_id);
    while (!wrong && !(wrong = tensord_receive(lane, answer, until_ns))) {
        if (answer->request_id == request_id && answer->final)
            return 0;
        wrong = tensord_release(lane, answer);
    }
    if (wrong == TENSORD_TIMEOUT && tensord_cancel(lane, request_id) == TENSORD_BUSY)
        lane->late = request_id;
    return wrong;
}

/* ---------------------------------------------------------------------------------------------------------------- end */

static inline void tensord__close_lane(tensord_lane *lane) {
    close(lane->fd);
    for (int i = 0; i < TENSORD_MAX_RESPONSES; i++)
        if (lane->responses[i].used)
            munmap(lane->responses[i].memory, lane->responses[i].byte_size);
    for (uint32_t i = 0; i < lane->next_segment; i++)
        munmap(lane->segments[i].memory, lane->segments[i].byte_size);
    for (int i = 0; i < TENSORD_MAX_NUMBERS; i++)
        free(lane->prepared[i]);
    free(lane->parts);
    free(lane);
}

/* Ends the connection, its lanes and all memory of both. */
static inline void tensord_close(tensord_client *client) {
    for (int i = 0; i < client->count; i++)
        tensord__close_lane(client->lanes[i]);
    client->count = 0;
    if (client->fd >= 0)
        close(client->fd);
    client->fd = -1;
}

#ifdef __cplusplus
}
#endif

#endif
