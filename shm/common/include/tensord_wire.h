/* The wire of tensord's lanes, in edition TENSORD_WIRE: what is sent, and functions that read and write it. For C11 and C++17; the daemon's
 * and the client's parts in C include it as tensord_lane.h does. Nothing here sends, receives or allocates, but for a writer that grows.
 *
 * A lane is a SOCK_SEQPACKET socket. A datagram of at most 64 KiB is one byte and MessagePack behind it:
 *
 *      0x01  an array of records
 *      0x02  the next part of such an array that holds one record, which is larger than a datagram; nothing comes between its parts
 *      0x03  the last part of it
 *
 * Records are arrays that begin with a tag. Fields at the end may be left out by the worker; they are then "" or nil or 0.
 *
 *      both      ["V", 3]                              first, in a datagram of its own, in each direction
 *                ["S+", segment, byte size]            a segment of memory; alone in its datagram, with its descriptor beside it
 *                ["S-", segment]                       it will not be named again
 *                ["S!", segment]                       the sender could not map the receiver's segment
 *      client    ["Q+", number, prepared request]      from now on the number (below 1024) stands for it
 *                ["q", request id, prepared, [content, ...], client id, deadline ns, received ns, priority, timeout us, sequence id,
 *                      sequence start, sequence end, trace, strikes, replace key, parameter set]
 *                                                      all fields, or all but the last or the last two. While the request waits the next one
 *                                                      of its key takes its place; "" is no key, and the parameter set main.
 *                                                      prepared: a number, or the request itself. ids are not 0, are never used again and
 *                                                      grow. The contents are those of the inputs without a place, in order; a client
 *                                                      sends bytes. deadline: CLOCK_MONOTONIC, 0 is none. trace 4 asks for times, else 0;
 *                                                      what it may be besides, received ns and strikes are for fronts: a client sends 0.
 *                ["tc", request id, trace id, span id] right before a request, in its datagram or, where it takes several, in one of its own: it
 *                                                      belongs to that trace of W3C Trace Context, which its sender samples (32 and 16
 *                                                      hexadecimal digits). May be left out.
 *                ["L", [[segment, offset, generation], ...]]    leases that are given back, each once
 *                ["T", request id, byte size]          so much more of its responses was taken: 256 and the bytes of the contents for each
 *                                                      that is not final. A model that streams stops where too much is not taken.
 *                ["X", request id]                     nobody waits any more; a final answer comes all the same
 *                ["E", model, sequence id]             no request of the sequence comes any more, the last of which came on this lane: it
 *                                                      ends once those that wait have run. Not answered.
 *      worker    ["C+", number, prepared answer]
 *                ["c", request id, prepared, [content, ...], lease, code, message, timeline, [queue ns, compute ns, copied bytes]]
 *                                                      code "": it is answered. Contents are those of the outputs without a place. The
 *                                                      timeline is for fronts: a client gets nil.
 *
 *      prepared request  ["P", model, version, [tensor, ...], [output, ...], {parameter: value}]      no outputs: all of them
 *      prepared answer   ["A", version, [tensor, ...], {parameter: value}, final]                     one answer of each request is final
 *      tensor            ["t", name, datatype, [dimension, ...], place or nil]
 *      output            ["o", name, place or nil, 0]
 *      place             ["r", "@SEGMENT", offset, byte size]       in a segment of the client's own; for outputs the room that there is
 *      content           bytes, or ["a", segment, offset, byte size] of the sender's memory
 *      lease             [segment, offset, generation], or nil
 *
 * Datatypes are the Open Inference Protocol's: BOOL, INT8 ... FP32, BF16, BYTES (each element a u32, little-endian, and so many bytes).
 */

#ifndef TENSORD_WIRE_H
#define TENSORD_WIRE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Local to each file that includes this. Compilers choose what to inline: all of it would be twice as much code. */
#define TENSORD__LOCAL static __attribute__((unused))

#define TENSORD_WIRE 3
#define TENSORD_MAX_DATAGRAM 65536
/* A client's records have fewer bytes. */
#define TENSORD_MAX_RECORD (1 << 20)
/* Numbers of prepared requests, and of prepared answers, are below. */
#define TENSORD_MAX_NUMBERS 1024
/* The first byte of a datagram. */
#define TENSORD_WHOLE 1
#define TENSORD_PART 2
#define TENSORD_LAST_PART 3
/* Asks in a request's ``trace`` for its times. */
#define TENSORD_TIMING 4
/* How many of the parameters that schedule a request come before its ``trace``; the others follow its ``strikes``. */
#define TENSORD_FIRST_SCHEDULING 5
/* The bytes that a response counts besides its contents where it is said how much was taken. */
#define TENSORD_RESPONSE_SIZE 256

/* Text of a record, without an end. */
typedef struct {
    const char *at;
    size_t size;
} tensord__text;

TENSORD__LOCAL tensord__text tensord__text_of(const char *text) {
    tensord__text made = {text, strlen(text)};
    return made;
}

/* ------------------------------------------------------------------------------------------------------------- writing */

/* Writes to ``at``, up to ``end``. ``grown``: memory of its own, which it gets when ``grows`` and the caller's is too small, and which
 * the caller frees. ``full``: something did not fit, and what was written is worthless. */
typedef struct {
    unsigned char *begin, *at, *end, *grown;
    int grows, full;
} tensord__writer;

TENSORD__LOCAL tensord__writer tensord__write_to(void *memory, size_t size) {
    tensord__writer to;
    to.begin = to.at = (unsigned char *)memory;
    to.end = to.begin + size;
    to.grown = NULL;
    to.grows = to.full = 0;
    return to;
}

/* Makes room for so many bytes. Returns whether there is. */
TENSORD__LOCAL int tensord__has_room(tensord__writer *to, size_t size) {
    if (to->full || size <= (size_t)(to->end - to->at))
        return !to->full;
    size_t used = (size_t)(to->at - to->begin), room = 2 * used + size;
    unsigned char *grown = to->grows ? (unsigned char *)realloc(to->grown, room) : NULL;
    if (grown == NULL) {
        to->full = 1;
        return 0;
    }
    if (to->grown == NULL)
        memcpy(grown, to->begin, used);
    to->grown = to->begin = grown;
    to->at = grown + used;
    to->end = grown + room;
    return 1;
}

TENSORD__LOCAL void tensord__put(tensord__writer *to, const void *content, size_t size) {
    if (!tensord__has_room(to, size))
        return;
    if (size)
        memcpy(to->at, content, size);
    to->at += size;
}

/* Writes a byte and a big-endian number of so many bytes behind it. */
TENSORD__LOCAL void tensord__put_wide(tensord__writer *to, int head, int width, uint64_t number) {
    if (!tensord__has_room(to, (size_t)width + 1))
        return;
    to->at[0] = (unsigned char)head;
    for (int i = width; i > 0; number >>= 8)
        to->at[i--] = (unsigned char)number;
    to->at += width + 1;
}

/* Writes a number of 2^power bytes behind the head of this width: ``head`` is that of one byte. */
TENSORD__LOCAL void tensord__put_power(tensord__writer *to, int head, int power, uint64_t number) {
    tensord__put_wide(to, head + power, 1 << power, number);
}

/* Writes the number behind the head of its width: ``head`` is that of the narrowest. */
TENSORD__LOCAL void tensord__put_sized(tensord__writer *to, int head, uint64_t number) {
    tensord__put_power(to, head, number < 0x100 ? 0 : number < 0x10000 ? 1 : number < 0x100000000u ? 2 : 3, number);
}

TENSORD__LOCAL void tensord__put_byte(tensord__writer *to, int byte) { tensord__put_wide(to, byte, 0, 0); }
TENSORD__LOCAL void tensord__put_nil(tensord__writer *to) { tensord__put_byte(to, 0xc0); }
TENSORD__LOCAL void tensord__put_bool(tensord__writer *to, int is) { tensord__put_byte(to, is ? 0xc3 : 0xc2); }

TENSORD__LOCAL void tensord__put_uint(tensord__writer *to, uint64_t number) {
    if (number < 0x80)
        tensord__put_byte(to, (int)number);
    else
        tensord__put_sized(to, 0xcc, number);
}

/* Writes a number in nine bytes, whatever it is, so that it can be overwritten by another one. */
TENSORD__LOCAL void tensord__put_u64(tensord__writer *to, uint64_t number) { tensord__put_wide(to, 0xcf, 8, number); }

TENSORD__LOCAL void tensord__put_int(tensord__writer *to, int64_t number) {
    if (number >= 0)
        tensord__put_uint(to, (uint64_t)number);
    else if (number >= -0x20)
        tensord__put_byte(to, (int)number & 0xff);
    else
        tensord__put_power(to, 0xd0, number >= INT8_MIN ? 0 : number >= INT16_MIN ? 1 : number >= INT32_MIN ? 2 : 3, (uint64_t)number);
}

TENSORD__LOCAL void tensord__put_float(tensord__writer *to, double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    tensord__put_wide(to, 0xcb, 8, bits);
}

/* Writes the head of so many elements. ``few``: the head of none; ``many``: that of a count of two bytes. */
TENSORD__LOCAL void tensord__put_count(tensord__writer *to, int few, int many, uint64_t count) {
    if (count < 0x10)
        tensord__put_byte(to, few | (int)count);
    else
        tensord__put_wide(to, many + (count >= 0x10000), count < 0x10000 ? 2 : 4, count);
}

TENSORD__LOCAL void tensord__put_array(tensord__writer *to, uint64_t count) { tensord__put_count(to, 0x90, 0xdc, count); }
TENSORD__LOCAL void tensord__put_map(tensord__writer *to, uint64_t count) { tensord__put_count(to, 0x80, 0xde, count); }

TENSORD__LOCAL void tensord__put_text(tensord__writer *to, tensord__text text) {
    if (text.size < 0x20)
        tensord__put_byte(to, 0xa0 | (int)text.size);
    else
        tensord__put_sized(to, 0xd9, text.size);
    tensord__put(to, text.at, text.size);
}

TENSORD__LOCAL void tensord__put_bytes(tensord__writer *to, const void *content, size_t size) {
    tensord__put_sized(to, 0xc4, size);
    tensord__put(to, content, size);
}

TENSORD__LOCAL void tensord__put_uints(tensord__writer *to, const uint64_t *numbers, int count) {
    for (int i = 0; i < count; i++)
        tensord__put_uint(to, numbers[i]);
}

/* Begins a record, or a part of one, with so many fields, the tag among them. */
TENSORD__LOCAL void tensord__put_tag(tensord__writer *to, uint64_t fields, const char *tag) {
    tensord__put_array(to, fields);
    tensord__put_text(to, tensord__text_of(tag));
}

/* Begins a datagram of so many records. */
TENSORD__LOCAL void tensord__put_datagram(tensord__writer *to, uint64_t records) {
    tensord__put_byte(to, TENSORD_WHOLE);
    tensord__put_array(to, records);
}

/* Begins a datagram of fewer than 65536 records in four bytes, however many they are. */
TENSORD__LOCAL void tensord__put_wide_datagram(tensord__writer *to, uint64_t records) {
    tensord__put_byte(to, TENSORD_WHOLE);
    tensord__put_wide(to, 0xdc, 2, records);
}

/* Writes a record of numbers alone: "V", "S+", "S-", "S!", "T" or "X". */
TENSORD__LOCAL void tensord__put_numbers(tensord__writer *to, const char *tag, const uint64_t *numbers, int count) {
    tensord__put_tag(to, (uint64_t)count + 1, tag);
    tensord__put_uints(to, numbers, count);
}

/* Begins the record that gives back so many leases, which follow. */
TENSORD__LOCAL void tensord__put_release(tensord__writer *to, uint64_t leases) {
    tensord__put_tag(to, 2, "L");
    tensord__put_array(to, leases);
}

/* Writes a lease, or times: an array of three numbers. */
TENSORD__LOCAL void tensord__put_lease(tensord__writer *to, const uint64_t lease[3]) {
    tensord__put_array(to, 3);
    tensord__put_uints(to, lease, 3);
}

/* Begins the record that ends a sequence. Behind it follow the model's name, and the sequence's number or text. */
TENSORD__LOCAL void tensord__put_end_sequence(tensord__writer *to) { tensord__put_tag(to, 3, "E"); }

TENSORD__LOCAL void tensord__put_trace_context(tensord__writer *to, uint64_t request_id, tensord__text trace_id, tensord__text span_id) {
    tensord__put_tag(to, 4, "tc");
    tensord__put_uint(to, request_id);
    tensord__put_text(to, trace_id);
    tensord__put_text(to, span_id);
}

/* Begins the record that gives a number its meaning, a prepared request, which follows. */
TENSORD__LOCAL void tensord__put_prepare(tensord__writer *to, uint64_t number) {
    tensord__put_tag(to, 3, "Q+");
    tensord__put_uint(to, number);
}

/* Begins a prepared request. Behind it follow the model's name, its version, an array of tensors, an array of outputs, a map. */
TENSORD__LOCAL void tensord__put_prepared_request(tensord__writer *to) { tensord__put_tag(to, 6, "P"); }

/* Begins a tensor. Behind it follow its name, its datatype, an array of its dimensions, and its place or nil. */
TENSORD__LOCAL void tensord__put_tensor(tensord__writer *to) { tensord__put_tag(to, 5, "t"); }

/* Begins an output. Behind it follow its name, its place or nil, and 0. */
TENSORD__LOCAL void tensord__put_output(tensord__writer *to) { tensord__put_tag(to, 4, "o"); }

/* Begins a place. Behind it follow "@SEGMENT" or a region's name, offset and size. */
TENSORD__LOCAL void tensord__put_place(tensord__writer *to) { tensord__put_tag(to, 4, "r"); }

/* Begins a request, whose id takes nine bytes. Behind it follow a number or a prepared request, an array of contents, its own fields. */
TENSORD__LOCAL void tensord__put_request(tensord__writer *to, uint64_t request_id) {
    tensord__put_tag(to, 16, "q");
    tensord__put_u64(to, request_id);
}

/* The fields of a request behind its contents. ``sequence_text``: where its ``at`` is NULL the sequence is ``sequence_id``. */
typedef struct {
    tensord__text client_id, sequence_text, replace_key, parameter_set;
    uint64_t deadline_ns, received_ns, priority, timeout_us, sequence_id, trace, strikes;
    int sequence_start, sequence_end;
} tensord__own;

/* Writes a request's own fields. The deadline takes nine bytes. */
TENSORD__LOCAL void tensord__put_own(tensord__writer *to, const tensord__own *own) {
    tensord__put_text(to, own->client_id);
    tensord__put_u64(to, own->deadline_ns);
    tensord__put_uint(to, own->received_ns);
    tensord__put_uint(to, own->priority);
    tensord__put_uint(to, own->timeout_us);
    if (own->sequence_text.at != NULL)
        tensord__put_text(to, own->sequence_text);
    else
        tensord__put_uint(to, own->sequence_id);
    tensord__put_bool(to, own->sequence_start);
    tensord__put_bool(to, own->sequence_end);
    tensord__put_uint(to, own->trace);
    tensord__put_uint(to, own->strikes);
    tensord__put_text(to, own->replace_key);
    tensord__put_text(to, own->parameter_set);
}

/* Begins an answer of so many fields by the number of its prepared answer. Behind it follow its contents, a lease or nil, ... */
TENSORD__LOCAL void tensord__put_answer(tensord__writer *to, uint64_t fields, uint64_t request_id, uint64_t number, uint64_t contents) {
    tensord__put_tag(to, fields, "c");
    tensord__put_uint(to, request_id);
    tensord__put_uint(to, number);
    tensord__put_array(to, contents);
}

/* Writes a content that lies in the sender's memory. */
TENSORD__LOCAL void tensord__put_slice(tensord__writer *to, uint64_t segment, uint64_t offset, uint64_t byte_size) {
    const uint64_t place[3] = {segment, offset, byte_size};
    tensord__put_numbers(to, "a", place, 3);
}

/* Begins the timeline of a traced request. Behind it follow so many arrays of a name and ns, and the other fields of shm/messages.py. */
TENSORD__LOCAL void tensord__put_timeline(tensord__writer *to, uint64_t moments) {
    tensord__put_tag(to, 8, "tl");
    tensord__put_array(to, moments);
}

/* ------------------------------------------------------------------------------------------------------------- reading */

/* Reads from ``at``, up to ``end``. ``bad``: what came is malformed, and so is everything that was read since. */
typedef struct {
    const unsigned char *at, *end;
    int bad;
} tensord__reader;

TENSORD__LOCAL tensord__reader tensord__read_from(const void *content, size_t size) {
    tensord__reader from;
    from.at = (const unsigned char *)content;
    from.end = from.at + size;
    from.bad = 0;
    return from;
}

/* Returns where the next so many bytes are; NULL: there are not so many. */
TENSORD__LOCAL const unsigned char *tensord__take(tensord__reader *from, uint64_t size) {
    const unsigned char *content = from->at;
    if (from->bad || size > (uint64_t)(from->end - from->at)) {
        from->bad = 1;
        return NULL;
    }
    from->at += size;
    return content;
}

TENSORD__LOCAL uint64_t tensord__take_wide(tensord__reader *from, int width) {
    const unsigned char *content = tensord__take(from, (uint64_t)width);
    uint64_t number = 0;
    for (int i = 0; content != NULL && i < width; i++)
        number = number << 8 | content[i];
    return number;
}

/* The kinds of values. */
enum {
    TENSORD__NIL,
    TENSORD__BOOL,
    TENSORD__UINT,
    TENSORD__NEGATIVE,
    TENSORD__FLOAT,
    TENSORD__TEXT,
    TENSORD__BYTES,
    TENSORD__ARRAY,
    TENSORD__MAP,
    TENSORD__BAD
};

/* Reads a value's head. ``number``: the number itself, a float's bits as a double, or how many bytes or elements follow. Returns the kind. */
TENSORD__LOCAL int tensord__take_head(tensord__reader *from, uint64_t *number) {
    static const unsigned char kinds[32] = {
        TENSORD__NIL,   TENSORD__BAD,   TENSORD__BOOL,  TENSORD__BOOL,  TENSORD__BYTES, TENSORD__BYTES, TENSORD__BYTES, TENSORD__BAD,
        TENSORD__BAD,   TENSORD__BAD,   TENSORD__FLOAT, TENSORD__FLOAT, TENSORD__UINT,  TENSORD__UINT,  TENSORD__UINT,  TENSORD__UINT,
        TENSORD__NEGATIVE, TENSORD__NEGATIVE, TENSORD__NEGATIVE, TENSORD__NEGATIVE, TENSORD__BAD, TENSORD__BAD, TENSORD__BAD, TENSORD__BAD,
        TENSORD__BAD,   TENSORD__TEXT,  TENSORD__TEXT,  TENSORD__TEXT,  TENSORD__ARRAY, TENSORD__ARRAY, TENSORD__MAP,   TENSORD__MAP};
    static const unsigned char widths[32] = {0, 0, 0, 0, 1, 2, 4, 0, 0, 0, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4};
    unsigned head = (unsigned)tensord__take_wide(from, 1);
    *number = head;
    if (from->bad)
        return TENSORD__BAD;
    if (head < 0x80)
        return TENSORD__UINT;
    if (head < 0xc0) {
        *number = head & (head < 0xa0 ? 0x0f : 0x1f);
        return head < 0x90 ? TENSORD__MAP : head < 0xa0 ? TENSORD__ARRAY : TENSORD__TEXT;
    }
    if (head >= 0xe0) {
        *number = (uint64_t)((int64_t)head - 0x100);
        return TENSORD__NEGATIVE;
    }
    int kind = kinds[head & 0x1f], width = widths[head & 0x1f];
    *number = tensord__take_wide(from, width);
    if (kind == TENSORD__BOOL)
        *number = head & 1;
    if (kind == TENSORD__FLOAT && width == 4) {
        uint32_t bits = (uint32_t)*number;
        float narrow;
        memcpy(&narrow, &bits, sizeof narrow);
        double wide = narrow;
        memcpy(number, &wide, sizeof wide);
    }
    if (kind == TENSORD__NEGATIVE) {
        int unused = 64 - 8 * width;
        int64_t is = (int64_t)(*number << unused) >> unused;
        *number = (uint64_t)is;
        kind = is < 0 ? TENSORD__NEGATIVE : TENSORD__UINT;
    }
    from->bad |= kind == TENSORD__BAD;
    return from->bad ? TENSORD__BAD : kind;
}

/* Reads a value of that kind; for text and bytes its head alone. */
TENSORD__LOCAL uint64_t tensord__take_kind(tensord__reader *from, int kind) {
    uint64_t number;
    if (tensord__take_head(from, &number) != kind)
        from->bad = 1;
    return from->bad ? 0 : number;
}

TENSORD__LOCAL uint64_t tensord__take_uint(tensord__reader *from) { return tensord__take_kind(from, TENSORD__UINT); }
TENSORD__LOCAL int tensord__take_bool(tensord__reader *from) { return (int)tensord__take_kind(from, TENSORD__BOOL); }

TENSORD__LOCAL void tensord__take_uints(tensord__reader *from, uint64_t *numbers, int count) {
    for (int i = 0; i < count; i++)
        numbers[i] = tensord__take_uint(from);
}

/* Reads an integer that may be negative. */
TENSORD__LOCAL int64_t tensord__take_int(tensord__reader *from) {
    uint64_t number;
    int kind = tensord__take_head(from, &number);
    if (kind != TENSORD__NEGATIVE && (kind != TENSORD__UINT || number > INT64_MAX))
        from->bad = 1;
    return (int64_t)number;
}

/* Reads an array's head. Each element has a byte at least. */
TENSORD__LOCAL uint64_t tensord__take_array(tensord__reader *from) {
    uint64_t count = tensord__take_kind(from, TENSORD__ARRAY);
    from->bad |= count > (uint64_t)(from->end - from->at);
    return from->bad ? 0 : count;
}

/* Returns whether bytes are UTF-8 as RFC 3629 has it: without surrogates, and each character in its shortest form. */
TENSORD__LOCAL int tensord__is_utf8(const unsigned char *at, size_t size) {
    const unsigned char *end = at + size;
    while (at < end) {
        unsigned first = *at++;
        if (first < 0x80)
            continue;
        int more = first < 0xc2 || first > 0xf4 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
        if (more == 0 || end - at < more || (first == 0xe0 && *at < 0xa0) || (first == 0xed && *at > 0x9f) || (first == 0xf0 && *at < 0x90) ||
            (first == 0xf4 && *at > 0x8f))
            return 0;
        for (; more > 0; more--)
            if ((*at++ & 0xc0) != 0x80)
                return 0;
    }
    return 1;
}

/* Reads a text. Other bytes than UTF-8 are malformed, also where nobody reads the text. */
TENSORD__LOCAL tensord__text tensord__take_text(tensord__reader *from) {
    tensord__text text;
    text.size = (size_t)tensord__take_kind(from, TENSORD__TEXT);
    text.at = (const char *)tensord__take(from, text.size);
    if (text.at != NULL && !tensord__is_utf8((const unsigned char *)text.at, text.size)) {
        from->bad = 1;
        text.at = NULL;
    }
    if (text.at == NULL)
        text.size = 0;
    return text;
}

/* Reads nil, if it comes next. Returns whether it did. */
TENSORD__LOCAL int tensord__take_nil(tensord__reader *from) {
    int is = !from->bad && from->at < from->end && *from->at == 0xc0;
    from->at += is;
    return is;
}

/* Returns whether a text is that one. */
TENSORD__LOCAL int tensord__is(tensord__text text, const char *other) {
    return text.at != NULL && text.size == strlen(other) && memcmp(text.at, other, text.size) == 0;
}

/* Begins to read a record, or a part of one, with that tag, and with so many fields, the tag among them. Returns how many it has. */
TENSORD__LOCAL uint64_t tensord__take_tag(tensord__reader *from, const char *tag, uint64_t least, uint64_t most) {
    uint64_t fields = tensord__take_array(from);
    from->bad |= fields < least || fields > most || !tensord__is(tensord__take_text(from), tag);
    return fields;
}

/* Returns whether a record with that tag comes next. */
TENSORD__LOCAL int tensord__comes(const tensord__reader *from, const char *tag) {
    tensord__reader ahead = *from;
    tensord__take_array(&ahead);
    return tensord__is(tensord__take_text(&ahead), tag);
}

/* Reads what is behind the tag of a record of one or two numbers: "V", "S+", "S-" or "S!". ``fields``: how many it has, the tag among them.
 * Returns how many numbers. */
TENSORD__LOCAL int tensord__take_numbers(tensord__reader *from, tensord__text tag, uint64_t fields, uint64_t numbers[2]) {
    int count = tensord__is(tag, "S+") ? 2 : 1;
    from->bad |= fields != (uint64_t)count + 1 ||
                 !(count == 2 || tensord__is(tag, "V") || tensord__is(tag, "S-") || tensord__is(tag, "S!"));
    tensord__take_uints(from, numbers, count);
    return count;
}

/* The bytes of a tensor, ``byte_size`` of them; NULL: they are in the sender's memory. */
typedef struct {
    const unsigned char *bytes;
    uint64_t segment, offset, byte_size;
} tensord__content;

TENSORD__LOCAL tensord__content tensord__take_content(tensord__reader *from) {
    tensord__content content = {NULL, 0, 0, 0};
    if (!from->bad && from->at < from->end && (*from->at & 0xe0) == 0x80) {
        uint64_t place[3];
        tensord__take_tag(from, "a", 4, 4);
        tensord__take_uints(from, place, 3);
        content.segment = place[0];
        content.offset = place[1];
        content.byte_size = place[2];
    } else {
        content.byte_size = tensord__take_kind(from, TENSORD__BYTES);
        content.bytes = tensord__take(from, content.byte_size);
    }
    return content;
}

/* Reads contents, and returns where they begin. */
TENSORD__LOCAL tensord__reader tensord__take_contents(tensord__reader *from, uint64_t *count) {
    *count = tensord__take_array(from);
    tensord__reader contents = *from;
    for (uint64_t i = 0; i < *count && !from->bad; i++)
        tensord__take_content(from);
    return contents;
}

TENSORD__LOCAL void tensord__take_lease(tensord__reader *from, uint64_t lease[3]) {
    from->bad |= tensord__take_array(from) != 3;
    tensord__take_uints(from, lease, 3);
}

/* A request behind its tag. */
typedef struct {
    uint64_t request_id, number, count;
    tensord__reader contents;
    tensord__own own;
} tensord__request;

/* Reads a request that names its prepared request by number. ``fields``: how many the record has, its tag among them. */
TENSORD__LOCAL tensord__request tensord__take_request(tensord__reader *from, uint64_t fields) {
    tensord__request request;
    memset(&request, 0, sizeof request);
    tensord__own *own = &request.own;
    from->bad |= fields < 14 || fields > 16;
    request.request_id = tensord__take_uint(from);
    request.number = tensord__take_uint(from);
    request.contents = tensord__take_contents(from, &request.count);
    own->client_id = tensord__take_text(from);
    own->deadline_ns = tensord__take_uint(from);
    own->received_ns = tensord__take_uint(from);
    own->priority = tensord__take_uint(from);
    own->timeout_us = tensord__take_uint(from);
    tensord__reader ahead = *from;
    if (tensord__take_head(&ahead, &own->sequence_id) == TENSORD__UINT) {
        *from = ahead;
    } else {
        own->sequence_id = 0;
        own->sequence_text = tensord__take_text(from);
    }
    own->sequence_start = tensord__take_bool(from);
    own->sequence_end = tensord__take_bool(from);
    own->trace = tensord__take_uint(from);
    own->strikes = tensord__take_uint(from);
    if (fields > 14)
        own->replace_key = tensord__take_text(from);
    if (fields > 15)
        own->parameter_set = tensord__take_text(from);
    return request;
}

/* Reads what is behind the tag of the record that gives leases back. */
TENSORD__LOCAL void tensord__take_release(tensord__reader *from) {
    uint64_t lease[3];
    for (uint64_t left = tensord__take_array(from); left > 0 && !from->bad; left--)
        tensord__take_lease(from, lease);
}

/* Reads what is behind the tag of the record that says which trace the next request belongs to. */
TENSORD__LOCAL void tensord__take_trace_context(tensord__reader *from, uint64_t fields) {
    from->bad |= fields < 3 || fields > 4;
    tensord__take_uint(from);
    tensord__take_text(from);
    if (fields > 3)
        tensord__take_text(from);
}

/* A tensor that is described. ``shape``: at its ``rank`` dimensions; ``region``: what its place names, if it is ``placed``. */
typedef struct {
    tensord__text name, datatype, region;
    tensord__reader shape;
    uint64_t rank;
    int placed;
} tensord__tensor;

TENSORD__LOCAL tensord__tensor tensord__take_tensor(tensord__reader *from) {
    tensord__tensor tensor;
    uint64_t fields = tensord__take_tag(from, "t", 4, 5);
    tensor.name = tensord__take_text(from);
    tensor.datatype = tensord__take_text(from);
    tensor.rank = tensord__take_array(from);
    tensor.shape = *from;
    for (uint64_t i = 0; i < tensor.rank && !from->bad; i++)
        tensord__take_int(from);
    tensor.placed = fields > 4 && !tensord__take_nil(from);
    tensor.region = tensord__text_of("");
    if (tensor.placed) {
        tensord__take_tag(from, "r", 4, 4);
        tensor.region = tensord__take_text(from);
        tensord__take_int(from);
        tensord__take_int(from);
    }
    return tensor;
}

/* The part that many answers share. ``outputs`` and ``parameters``: at the first of them; ``own``: how many outputs have a content in each answer. */
typedef struct {
    uint64_t version, output_count, own, parameter_count;
    tensord__reader outputs, parameters;
    int final;
} tensord__prepared_answer;

TENSORD__LOCAL tensord__prepared_answer tensord__take_prepared_answer(tensord__reader *from) {
    tensord__prepared_answer prepared;
    memset(&prepared, 0, sizeof prepared);
    uint64_t fields = tensord__take_tag(from, "A", 1, 5), number;
    prepared.version = fields > 1 ? tensord__take_uint(from) : 0;
    prepared.output_count = fields > 2 ? tensord__take_array(from) : 0;
    prepared.outputs = *from;
    for (uint64_t i = 0; i < prepared.output_count && !from->bad; i++)
        prepared.own += !tensord__take_tensor(from).placed;
    prepared.parameter_count = fields > 3 ? tensord__take_kind(from, TENSORD__MAP) : 0;
    prepared.parameters = *from;
    for (uint64_t i = 0; i < prepared.parameter_count && !from->bad; i++) {
        tensord__take_text(from);
        int kind = tensord__take_head(from, &number);
        if (kind == TENSORD__TEXT)
            tensord__take(from, number);
        else
            from->bad |= kind < TENSORD__BOOL || kind > TENSORD__FLOAT;
    }
    prepared.final = fields > 4 ? tensord__take_bool(from) : 1;
    return prepared;
}

/* An answer behind its tag. ``numbered``: its prepared answer is the one with that number, else it is in ``prepared``. */
typedef struct {
    uint64_t request_id, number, count, lease[3], timing[3];
    int numbered, has_lease, has_timing;
    tensord__prepared_answer prepared;
    tensord__reader contents;
    tensord__text code, message;
} tensord__answer;

/* Reads an answer that was not asked for a timeline. ``fields``: how many the record has, its tag among them. */
TENSORD__LOCAL tensord__answer tensord__take_answer(tensord__reader *from, uint64_t fields) {
    tensord__answer answer;
    memset(&answer, 0, sizeof answer);
    from->bad |= fields < 3 || fields > 9;
    answer.request_id = tensord__take_uint(from);
    answer.numbered = from->at < from->end && (*from->at & 0xe0) != 0x80 && *from->at != 0xdc && *from->at != 0xdd;
    if (answer.numbered)
        answer.number = tensord__take_uint(from);
    else
        answer.prepared = tensord__take_prepared_answer(from);
    if (fields > 3)
        answer.contents = tensord__take_contents(from, &answer.count);
    answer.has_lease = fields > 4 && !tensord__take_nil(from);
    if (answer.has_lease)
        tensord__take_lease(from, answer.lease);
    if (fields > 5)
        answer.code = tensord__take_text(from);
    if (fields > 6)
        answer.message = tensord__take_text(from);
    from->bad |= fields > 7 && !tensord__take_nil(from);
    answer.has_timing = fields > 8 && !tensord__take_nil(from);
    if (answer.has_timing)
        tensord__take_lease(from, answer.timing);
    return answer;
}

/* ------------------------------------------------------------------------------------------------------------- waiting */

/* When to poll for a datagram before sleeping, as waking a process takes longer than a small request. It pays only if the last wait was short,
 * and after little work; after polls in vain it pauses for ever more waits, at most 63. The worker does the same (shm/spin.py). */
typedef struct {
    /* How long to poll at most; when the last wait began and ended; in ns of CLOCK_MONOTONIC. */
    uint64_t limit, since, ended;
    /* Whether that was short enough; whether the wait that has begun polls; the waits to sleep in before the next poll, and those since the last one. */
    int worth, polls, pause, paused;
} tensord__waits;

/* Begins a wait. Returns until when to poll; 0: not at all. */
TENSORD__LOCAL uint64_t tensord__begin_wait(tensord__waits *waits, uint64_t now) {
    waits->since = now;
    waits->polls = waits->worth && 2 * (now - waits->ended) <= waits->limit && ++waits->paused > waits->pause;
    return waits->polls ? now + waits->limit : 0;
}

TENSORD__LOCAL void tensord__end_wait(tensord__waits *waits, uint64_t now) {
    waits->ended = now;
    waits->worth = now - waits->since < waits->limit;
    if (waits->polls) {
        waits->polls = waits->paused = 0;
        waits->pause = waits->worth ? 0 : waits->pause < 63 ? 2 * waits->pause + 1 : 63;
    }
}

#endif
