/* Reads requests with a number and writes their answers, as shm/messages.py has them, in the subset of msgpack that they need.
 *
 *     RequestRecord   ["q", request id, number, [content, ...], client id, deadline, received,
 *                      priority, timeout, sequence id, starts it, ends it, trace, strikes, replace key, parameter set]; the last two may be
 *                      left out
 *     AnswerRecord    ["c", request id, number, [content, ...]], a lease or nil, no code, no message, a timeline or nil, and the timing;
 *                     what nobody asked for is left out at the end
 *     Timeline        ["tl", [[name, ns], ...]], and what Python has encoded
 *     TraceContext    ["tc", request id, trace id, span id]
 *     Release         ["L", [lease, ...]]                         lease: [segment, offset, generation]
 *     content         bytes, or where they are: ["a", segment, offset, byte size]
 *
 * Reading stays below ``end`` and fails (-1, no exception) on anything else: Python's decoder judges that.
 */

#include "_native.h"

static int read_bytes(reader_t *reader, uint64_t size, const unsigned char **content) {
    if (size > (uint64_t)(reader->end - reader->at))
        return -1;
    *content = reader->at;
    reader->at += size;
    return 0;
}

/* Reads a big-endian number of 1, 2, 4 or 8 bytes. */
static int read_number(reader_t *reader, int width, uint64_t *number) {
    const unsigned char *content;
    if (read_bytes(reader, (uint64_t)width, &content))
        return -1;
    *number = 0;
    for (int i = 0; i < width; i++)
        *number = *number << 8 | content[i];
    return 0;
}

/* Reads an integer that is not negative. */
static int read_uint(reader_t *reader, uint64_t *number) {
    uint64_t head;
    if (read_number(reader, 1, &head))
        return -1;
    if (head < 0x80) {
        *number = head;
        return 0;
    }
    return head < 0xcc || head > 0xcf ? -1 : read_number(reader, 1 << (head - 0xcc), number);
}

int read_array(reader_t *reader, uint64_t *count) {
    uint64_t head;
    if (read_number(reader, 1, &head))
        return -1;
    if ((head & 0xf0) == 0x90) {
        *count = head & 0x0f;
        return 0;
    }
    return head == 0xdc ? read_number(reader, 2, count) : -1;
}

static int read_bin(reader_t *reader, const unsigned char **content, uint64_t *size) {
    uint64_t head;
    if (read_number(reader, 1, &head) || head < 0xc4 || head > 0xc6 || read_number(reader, 1 << (head - 0xc4), size))
        return -1;
    return read_bytes(reader, *size, content);
}

static int read_str(reader_t *reader, const unsigned char **content, uint64_t *size) {
    uint64_t head;
    if (read_number(reader, 1, &head))
        return -1;
    if ((head & 0xe0) == 0xa0)
        *size = head & 0x1f;
    else if (head < 0xd9 || head > 0xdb || read_number(reader, 1 << (head - 0xd9), size))
        return -1;
    return read_bytes(reader, *size, content);
}

static int skip_str(reader_t *reader) {
    uint64_t size;
    const unsigned char *content;
    return read_str(reader, &content, &size);
}

static int read_bool(reader_t *reader, int *value) {
    uint64_t head;
    if (read_number(reader, 1, &head))
        return -1;
    *value = head == 0xc3;
    return head != 0xc2 && head != 0xc3;
}

/* Reads a number, or a string of at most MAX_SEQUENCE_ID bytes: then ``text`` is not NULL, and ``number`` its size. */
int read_sequence_id(reader_t *reader, const unsigned char **text, uint64_t *number) {
    reader_t start = *reader;
    *text = NULL;
    if (!read_uint(reader, number))
        return 0;
    *reader = start;
    return read_str(reader, text, number) || *number > MAX_SEQUENCE_ID;
}

#define SLICE "\x94\xa1" "a"

/* Reads a tensor: its bytes, or its place. */
static int read_content(reader_t *reader, request_record_t *record, uint64_t i) {
    const unsigned char *head;
    if (reader->at == reader->end || *reader->at != (unsigned char)SLICE[0])
        return read_bin(reader, &record->contents[i], &record->sizes[i]);
    record->contents[i] = NULL;
    return read_bytes(reader, 3, &head) || memcmp(head, SLICE, 3) || read_uint(reader, &record->places[i].segment) ||
           read_uint(reader, &record->places[i].offset) || read_uint(reader, &record->sizes[i]);
}

int read_request_record(reader_t *reader, request_record_t *record) {
    const unsigned char *tag, *text;
    uint64_t fields, priority, timeout, number;
    if (read_array(reader, &fields) || fields < 14 || fields > 16 || read_bytes(reader, 2, &tag) || memcmp(tag, "\xa1q", 2) ||
        read_uint(reader, &record->id) ||
        read_uint(reader, &record->number) || read_array(reader, &record->count) || record->count > MAX_TENSORS)
        return -1;
    for (uint64_t i = 0; i < record->count; i++)
        if (read_content(reader, record, i))
            return -1;
    /* Priority and timeout change nothing for what is run here: there is one queue, and nothing waits for a slot. */
    if (skip_str(reader) || read_uint(reader, &record->deadline_ns) || read_uint(reader, &record->received_ns) ||
        read_uint(reader, &priority) || read_uint(reader, &timeout))
        return -1;
    record->sequence = *reader;
    if (read_sequence_id(reader, &text, &number) || read_bool(reader, &record->start) || read_bool(reader, &record->end) ||
        read_uint(reader, &record->trace) || read_uint(reader, &record->strikes))
        return -1;
    /* What replaces a waiting request, or may be replaced, is Python's: it has the queue. */
    if (fields > 14 && (read_str(reader, &text, &number) || number))
        return -1;
    record->set_size = 0;
    return fields > 15 && (read_str(reader, &record->set, &record->set_size) || record->set_size > MAX_SET_NAME);
}

#define RELEASE "\x92\xa1" "L"

/* Returns whether the next record is a Release. */
int is_release(const reader_t *reader) {
    return reader->end - reader->at > 3 && memcmp(reader->at, RELEASE, 3) == 0;
}

int skip_release(reader_t *reader) {
    const unsigned char *head;
    uint64_t leases, numbers, number;
    if (read_bytes(reader, 3, &head) || read_array(reader, &leases))
        return -1;
    for (uint64_t i = 0; i < leases; i++)
        if (read_array(reader, &numbers) || numbers != 3 || read_uint(reader, &number) || read_uint(reader, &number) ||
            read_uint(reader, &number))
            return -1;
    return 0;
}

#define TRACE_CONTEXT "\x94\xa2" "tc"

/* Returns whether the next record is a TraceContext. */
int is_trace_context(const reader_t *reader) {
    return reader->end - reader->at > 4 && memcmp(reader->at, TRACE_CONTEXT, 4) == 0;
}

int skip_trace_context(reader_t *reader) {
    const unsigned char *head;
    uint64_t id;
    return read_bytes(reader, 4, &head) || read_uint(reader, &id) || skip_str(reader) || skip_str(reader);
}

static unsigned char *write_number(unsigned char *at, int width, uint64_t number) {
    for (int i = width; i-- > 0; number >>= 8)
        at[i] = (unsigned char)number;
    return at + width;
}

static unsigned char *write_uint(unsigned char *at, uint64_t number) {
    if (number < 0x80)
        return write_number(at, 1, number);
    *at = 0xcf;
    return write_number(at + 1, 8, number);
}

unsigned char *write_bin_head(unsigned char *at, uint64_t size) {
    *at = 0xc6;
    return write_number(at + 1, 4, size);
}

unsigned char *write_slice(unsigned char *at, uint64_t segment, uint64_t offset, uint64_t size) {
    memcpy(at, SLICE, 3);
    return write_uint(write_uint(write_uint(at + 3, segment), offset), size);
}

unsigned char *write_lease(unsigned char *at, uint64_t segment, uint64_t offset, uint64_t generation) {
    *at = 0x93;
    return write_uint(write_uint(write_uint(at + 1, segment), offset), generation);
}

unsigned char *write_nil(unsigned char *at) {
    return write_number(at, 1, 0xc0);
}

/* Writes the fields of an AnswerRecord behind its lease: no code and no message. */
unsigned char *write_no_error(unsigned char *at) {
    memcpy(at, "\xa0\xa0", 2);
    return at + 2;
}

/* Writes when a traced request was where. ``rest``: the fields behind the moments. */
unsigned char *write_timeline(unsigned char *at, const uint64_t moments[TRACE_MOMENTS], const unsigned char *rest, size_t size) {
    static const char *const names[TRACE_MOMENTS] = {"QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START",
                                                     "COMPUTE_END"};
    memcpy(at, "\x98\xa2" "tl", 4);
    at = write_number(at + 4, 1, 0x90 + TRACE_MOMENTS);
    for (int i = 0; i < TRACE_MOMENTS; i++) {
        size_t length = strlen(names[i]);
        at = write_number(write_number(at, 1, 0x92), 1, 0xa0 + length);
        memcpy(at, names[i], length);
        at = write_uint(at + length, moments[i]);
    }
    memcpy(at, rest, size);
    return at + size;
}

unsigned char *write_timing(unsigned char *at, uint64_t queue_ns, uint64_t compute_ns, uint64_t copied) {
    at = write_number(at, 1, 0x93);
    return write_uint(write_uint(write_uint(at, queue_ns), compute_ns), copied);
}

/* Writes an AnswerRecord up to its contents. ``more``: what follows them. */
unsigned char *write_answer_record(unsigned char *at, uint64_t id, uint64_t number, int count, int more) {
    memcpy(at, more == TIMED_ANSWER ? "\x99\xa1" "c" : more == TRACED_ANSWER ? "\x98\xa1" "c" : more == LEASED_ANSWER ? "\x95\xa1" "c" : "\x94\xa1" "c", 3);
    at = write_uint(write_uint(at + 3, id), number);
    *at = 0xdc;
    return write_number(at + 1, 2, (uint64_t)count);
}

/* Writes the DATAGRAM_HEAD bytes at the beginning of a datagram. */
void write_datagram_head(unsigned char *at, uint64_t records) {
    at[0] = INLINE_KIND;
    at[1] = 0xdc;
    write_number(at + 2, 2, records);
}

/* Returns a datagram of records as bytes, or NULL with an exception. ``parts``: where they lie, some with the record before them. */
PyObject *datagram_of(const reader_t *parts, size_t count, uint64_t records) {
    size_t size = DATAGRAM_HEAD;
    for (size_t i = 0; i < count; i++)
        size += (size_t)(parts[i].end - parts[i].at);
    PyObject *datagram = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (datagram == NULL)
        return NULL;
    unsigned char *at = (unsigned char *)PyBytes_AsString(datagram);
    write_datagram_head(at, records);
    at += DATAGRAM_HEAD;
    for (size_t i = 0; i < count; i++) {
        memcpy(at, parts[i].at, (size_t)(parts[i].end - parts[i].at));
        at += parts[i].end - parts[i].at;
    }
    return datagram;
}
