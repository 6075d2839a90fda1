/* HPACK's decoding end: a header block becomes the fields that calls have in common, and those that are a call's own.
 *
 *     | :method POST | :path /... | te trailers | grpc-timeout 5S | user-agent ... | traceparent 00-... |
 *          common        common       common           own             common              own
 *
 *     common: { u32 size of the name | u32 size of the value | name | value }, in the host's order of bytes
 *
 * Python's decoder (daemon/grpc/hpack_decoder.py) says in words what is found, with the hpack library; both find the same, and
 * refuse the same. Nothing is read outside of the given block, and nothing is kept but the dynamic table.
 * Source: RFC 7541; sections stand where they are followed.
 */

#include "../../shm/_python.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Section 4.1: what an entry takes beside its name and value. */
#define ENTRY_SIZE 32
/* SETTINGS_HEADER_TABLE_SIZE, which we leave as it is. */
#define TABLE_SIZE 4096
#define MAX_ENTRIES (TABLE_SIZE / ENTRY_SIZE)
/* Section 5.1 leaves the limit to us: behind its prefix an integer has at most so many bytes. */
#define MAX_INTEGER_BYTES 5
#define FIRST_ROOM 1024

typedef enum {
    DONE,
    /* It is no header block. */
    MALFORMED,
    /* The fields are larger than allowed. */
    TOO_LARGE,
    /* Python's exception is set. */
    FAILED,
} result_t;

typedef struct {
    const uint8_t *bytes;
    size_t size;
} text_t;

/* Bytes that become more; most stay within the room that is there from the beginning. */
typedef struct {
    uint8_t *bytes;
    size_t size, room;
    uint8_t first[FIRST_ROOM];
} buffer_t;

typedef struct {
    text_t name, value;
    /* 1 if calls have it in common. */
    bool common;
    uint8_t bytes[];
} entry_t;

typedef struct {
    PyObject_HEAD
    size_t max_list_size;
    /* The dynamic table, a ring: the newest entry is the one before ``next``. */
    entry_t *entries[MAX_ENTRIES];
    size_t next, count, size, max_size;
    /* The headers that the last call had in common with others, if they are small: the next mostly says the same, and its hash is known. */
    PyObject *common;
} decoder_t;

/* A block that is being decoded. */
typedef struct {
    const uint8_t *at, *end;
    size_t list_size;
    bool has_fields;
    buffer_t common, name, value;
    PyObject *own;
} block_t;

/* ---------------------------------------------------------------------------------------------------------- buffers */

static void begin(buffer_t *buffer) {
    buffer->bytes = buffer->first;
    buffer->size = 0;
    buffer->room = FIRST_ROOM;
}

static void end(buffer_t *buffer) {
    if (buffer->bytes != buffer->first)
        PyMem_Free(buffer->bytes);
}

/* Makes room for so many bytes more. */
static bool reserve(buffer_t *buffer, size_t more) {
    if (more <= buffer->room - buffer->size)
        return true;
    size_t room = buffer->size + more + buffer->room;
    uint8_t *bytes = PyMem_Malloc(room);
    if (bytes == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(bytes, buffer->bytes, buffer->size);
    end(buffer);
    buffer->bytes = bytes;
    buffer->room = room;
    return true;
}

static void append(buffer_t *buffer, const void *bytes, size_t size) {
    memcpy(buffer->bytes + buffer->size, bytes, size);
    buffer->size += size;
}

/* ---------------------------------------------------------------------------------- Huffman's code (appendix B, 5.2) */

#define EOS 256
#define SHORTEST 5
#define LONGEST 30
#define ONES ((1u << LONGEST) - 1)

/* How long the code of each symbol is. The code is canonical: codes of a length follow each other, in the order of symbols, and
 * the first of the next length follows the last of them. */
static const uint8_t CODE_SIZES[EOS + 1] = {
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6,  10, 10, 12, 13, 6,  8,  11, 10, 10, 8,  11, 8,  6,  6,  6,  5,  5,  5,  6,  6,  6,  6,  6,  6,  6,  7,  8,  15, 6,  12, 10,
    13, 6,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  8,  7,  8,  13, 19, 13, 14, 6,
    15, 5,  6,  5,  6,  5,  6,  6,  6,  5,  7,  7,  6,  6,  6,  5,  6,  7,  6,  5,  5,  6,  7,  7,  7,  7,  7,  15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
};
/* The first code that is longer than each length, filled up to LONGEST bits, and the position of code 0 among the symbols. */
static uint32_t beyond[LONGEST + 1];
static int32_t origin[LONGEST + 1];
/* All of them by their codes. */
static uint16_t symbols[EOS + 1];
/* How long a code is that begins with this byte, and at least, if it is longer than that. */
static uint8_t at_least[256];

static void make_code(void) {
    uint32_t code = 0;
    int32_t count = 0;
    for (int size = SHORTEST; size <= LONGEST; size++) {
        origin[size] = count - (int32_t)code;
        for (uint16_t symbol = 0; symbol <= EOS; symbol++)
            if (CODE_SIZES[symbol] == size) {
                symbols[count++] = symbol;
                code++;
            }
        beyond[size] = code << (LONGEST - size);
        code <<= 1;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        at_least[byte] = SHORTEST;
        while (at_least[byte] <= 8 && byte << (LONGEST - 8) >= beyond[at_least[byte]])
            at_least[byte]++;
    }
}

/* Appends what the text stands for. What is left at its end has to be the beginning of EOS, and less than a byte. */
static result_t decode_text(text_t text, buffer_t *decoded) {
    if (!reserve(decoded, text.size * 8 / SHORTEST))
        return FAILED;
    const uint8_t *at = text.bytes, *end = at + text.size;
    uint64_t bits = 0;
    int count = 0;
    for (;;) {
        while (count < LONGEST && at < end) {
            bits = bits << 8 | *at++;
            count += 8;
        }
        uint32_t window = (uint32_t)(count >= LONGEST ? bits >> (count - LONGEST) : bits << (LONGEST - count) | ONES >> count) & ONES;
        int size = at_least[window >> (LONGEST - 8)];
        /* The longest code is all ones. */
        while (size < LONGEST && window >= beyond[size])
            size++;
        if (size > count)
            return count < 8 && window == ONES ? DONE : MALFORMED;
        uint16_t symbol = symbols[origin[size] + (int32_t)(window >> (LONGEST - size))];
        if (symbol == EOS)
            return MALFORMED;
        decoded->bytes[decoded->size++] = (uint8_t)symbol;
        count -= size;
    }
}

/* ----------------------------------------------------------------------------------------------------------- tables */

#define STATIC_COUNT 61

static const char *const STATIC[STATIC_COUNT][2] = { /* appendix A */
    {":authority", ""}, {":method", "GET"}, {":method", "POST"}, {":path", "/"}, {":path", "/index.html"}, {":scheme", "http"},
    {":scheme", "https"}, {":status", "200"}, {":status", "204"}, {":status", "206"}, {":status", "304"}, {":status", "400"},
    {":status", "404"}, {":status", "500"}, {"accept-charset", ""}, {"accept-encoding", "gzip, deflate"}, {"accept-language", ""},
    {"accept-ranges", ""}, {"accept", ""}, {"access-control-allow-origin", ""}, {"age", ""}, {"allow", ""}, {"authorization", ""},
    {"cache-control", ""}, {"content-disposition", ""}, {"content-encoding", ""}, {"content-language", ""}, {"content-length", ""},
    {"content-location", ""}, {"content-range", ""}, {"content-type", ""}, {"cookie", ""}, {"date", ""}, {"etag", ""},
    {"expect", ""}, {"expires", ""}, {"from", ""}, {"host", ""}, {"if-match", ""}, {"if-modified-since", ""}, {"if-none-match", ""},
    {"if-range", ""}, {"if-unmodified-since", ""}, {"last-modified", ""}, {"link", ""}, {"location", ""}, {"max-forwards", ""},
    {"proxy-authenticate", ""}, {"proxy-authorization", ""}, {"range", ""}, {"referer", ""}, {"refresh", ""}, {"retry-after", ""},
    {"server", ""}, {"set-cookie", ""}, {"strict-transport-security", ""}, {"transfer-encoding", ""}, {"user-agent", ""},
    {"vary", ""}, {"via", ""}, {"www-authenticate", ""},
};
static entry_t static_entries[STATIC_COUNT];

/* As in daemon/grpc/hpack_decoder.py. */
static const char *const COMMON[] = {
    ":method", ":scheme", ":path", ":authority", "te", "content-type", "user-agent", "host", "grpc-encoding", "grpc-accept-encoding",
};

static bool is_common(text_t name) {
    for (size_t i = 0; i < sizeof COMMON / sizeof *COMMON; i++)
        if (strlen(COMMON[i]) == name.size && memcmp(COMMON[i], name.bytes, name.size) == 0)
            return true;
    return false;
}

static void make_static_table(void) {
    for (size_t i = 0; i < STATIC_COUNT; i++) {
        entry_t *entry = &static_entries[i];
        entry->name = (text_t){(const uint8_t *)STATIC[i][0], strlen(STATIC[i][0])};
        entry->value = (text_t){(const uint8_t *)STATIC[i][1], strlen(STATIC[i][1])};
        entry->common = is_common(entry->name);
    }
}

static size_t size_of(text_t name, text_t value) {
    return name.size + value.size + ENTRY_SIZE;
}

/* Section 2.3.3. NULL: there is no entry of that index. */
static const entry_t *entry_at(const decoder_t *self, uint64_t index) {
    if (index >= 1 && index <= STATIC_COUNT)
        return &static_entries[index - 1];
    if (index > STATIC_COUNT && index - STATIC_COUNT <= self->count)
        return self->entries[(self->next + MAX_ENTRIES - (size_t)(index - STATIC_COUNT)) % MAX_ENTRIES];
    return NULL;
}

/* Takes the oldest entries out, until what is left has at most that size. */
static void evict(decoder_t *self, size_t most) {
    while (self->size > most) {
        entry_t *oldest = self->entries[(self->next + MAX_ENTRIES - self->count) % MAX_ENTRIES];
        self->size -= size_of(oldest->name, oldest->value);
        self->count--;
        PyMem_Free(oldest);
    }
}

/* Section 4.4. An entry larger than the table empties it. The name may be that of an entry that has to go for it. */
static result_t add(decoder_t *self, text_t name, text_t value, bool common) {
    size_t size = size_of(name, value);
    if (size > self->max_size) {
        evict(self, 0);
        return DONE;
    }
    entry_t *entry = PyMem_Malloc(sizeof *entry + name.size + value.size);
    if (entry == NULL) {
        PyErr_NoMemory();
        return FAILED;
    }
    memcpy(entry->bytes, name.bytes, name.size);
    memcpy(entry->bytes + name.size, value.bytes, value.size);
    entry->name = (text_t){entry->bytes, name.size};
    entry->value = (text_t){entry->bytes + name.size, value.size};
    entry->common = common;
    evict(self, self->max_size - size);
    self->entries[self->next] = entry;
    self->next = (self->next + 1) % MAX_ENTRIES;
    self->count++;
    self->size += size;
    return DONE;
}

/* --------------------------------------------------------------------------------------------------------- decoding */

/* Section 5.1: an integer whose prefix are the last bits of the next byte. false: it is cut off, or too long. */
static bool read_integer(block_t *block, int prefix, uint64_t *number) {
    if (block->at == block->end)
        return false;
    uint64_t most = (1u << prefix) - 1;
    *number = *block->at++ & most;
    if (*number < most)
        return true;
    for (int i = 0; i < MAX_INTEGER_BYTES && block->at < block->end; i++) {
        uint8_t byte = *block->at++;
        *number += (uint64_t)(byte & 127) << 7 * i;
        if (byte < 128)
            return true;
    }
    return false;
}

/* Section 5.2. The text lies in the block, or in the buffer. */
static result_t read_text(block_t *block, buffer_t *decoded, text_t *text) {
    bool coded = block->at < block->end && *block->at & 0x80;
    uint64_t size;
    if (!read_integer(block, 7, &size) || size > (uint64_t)(block->end - block->at))
        return MALFORMED;
    *text = (text_t){block->at, (size_t)size};
    block->at += size;
    if (!coded)
        return DONE;
    decoded->size = 0;
    result_t result = decode_text(*text, decoded);
    *text = (text_t){decoded->bytes, decoded->size};
    return result;
}

/* A field goes to what it belongs to. One of HTTP/2's own behind one of a call's own stays there: it is not allowed, and has to
 * be seen. */
static result_t take(const decoder_t *self, block_t *block, text_t name, text_t value, bool common) {
    block->has_fields = true;
    block->list_size += size_of(name, value);
    if (block->list_size > self->max_list_size)
        return TOO_LARGE;
    if (common && !(name.bytes[0] == ':' && PyList_Size(block->own) > 0)) {
        uint32_t sizes[2] = {(uint32_t)name.size, (uint32_t)value.size};
        if (!reserve(&block->common, sizeof sizes + name.size + value.size))
            return FAILED;
        append(&block->common, sizes, sizeof sizes);
        append(&block->common, name.bytes, name.size);
        append(&block->common, value.bytes, value.size);
        return DONE;
    }
    PyObject *field = Py_BuildValue("(NN)", PyBytes_FromStringAndSize((const char *)name.bytes, (Py_ssize_t)name.size),
                                    PyBytes_FromStringAndSize((const char *)value.bytes, (Py_ssize_t)value.size));
    bool failed = field == NULL || PyList_Append(block->own, field) != 0;
    Py_XDECREF(field);
    return failed ? FAILED : DONE;
}

/* Section 6.1. */
static result_t take_indexed(const decoder_t *self, block_t *block) {
    uint64_t index;
    const entry_t *entry = read_integer(block, 7, &index) ? entry_at(self, index) : NULL;
    return entry == NULL ? MALFORMED : take(self, block, entry->name, entry->value, entry->common);
}

/* Section 6.2. Whether a literal is never to be indexed matters to who sends it on, which we do not. */
static result_t take_literal(decoder_t *self, block_t *block, int prefix, bool indexes) {
    uint64_t index;
    text_t name, value;
    bool common;
    result_t result;
    if (!read_integer(block, prefix, &index))
        return MALFORMED;
    if (index > 0) {
        const entry_t *entry = entry_at(self, index);
        if (entry == NULL)
            return MALFORMED;
        name = entry->name;
        common = entry->common;
    } else {
        if ((result = read_text(block, &block->name, &name)) != DONE)
            return result;
        common = is_common(name);
    }
    if ((result = read_text(block, &block->value, &value)) != DONE)
        return result;
    result = take(self, block, name, value, common);
    return result == DONE && indexes ? add(self, name, value, common) : result;
}

/* Section 6.3; section 4.2: before the first field. */
static result_t resize(decoder_t *self, block_t *block) {
    uint64_t size;
    if (block->has_fields || !read_integer(block, 5, &size) || size > TABLE_SIZE)
        return MALFORMED;
    self->max_size = (size_t)size;
    evict(self, self->max_size);
    return DONE;
}

static result_t take_all(decoder_t *self, block_t *block) {
    result_t result = DONE;
    while (result == DONE && block->at < block->end) {
        uint8_t first = *block->at;
        if (first & 0x80)
            result = take_indexed(self, block);
        else if (first & 0x40)
            result = take_literal(self, block, 6, true);
        else if (first & 0x20)
            result = resize(self, block);
        else
            result = take_literal(self, block, 4, false);
    }
    return result;
}

/* Returns what was found of a call that others have too: a new reference. */
static PyObject *common_of(decoder_t *self, const buffer_t *found) {
    if (self->common != NULL && (size_t)PyBytes_Size(self->common) == found->size &&
        memcmp(PyBytes_AsString(self->common), found->bytes, found->size) == 0) {
        Py_INCREF(self->common);
        return self->common;
    }
    PyObject *common = PyBytes_FromStringAndSize((const char *)found->bytes, (Py_ssize_t)found->size);
    if (common != NULL && found->bytes == found->first) {
        Py_XDECREF(self->common);
        Py_INCREF(common);
        self->common = common;
    }
    return common;
}

static PyObject *decode(decoder_t *self, PyObject *content) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(content, &buffer, PyBUF_SIMPLE) != 0)
        return NULL;
    block_t block;
    block.at = buffer.buf;
    block.end = block.at + buffer.len;
    block.list_size = 0;
    block.has_fields = false;
    begin(&block.common);
    begin(&block.name);
    begin(&block.value);
    block.own = PyList_New(0);
    result_t result = block.own == NULL ? FAILED : take_all(self, &block);
    PyObject *found = NULL;
    if (result == DONE)
        found = Py_BuildValue("NO", common_of(self, &block.common), block.own);
    else if (result == MALFORMED)
        PyErr_Format(PyExc_ValueError, "a header block of %zd bytes cannot be decoded", buffer.len);
    else if (result == TOO_LARGE)
        PyErr_Format(PyExc_OverflowError, "a list of headers has more than %zu bytes", self->max_list_size);
    end(&block.common);
    end(&block.name);
    end(&block.value);
    Py_XDECREF(block.own);
    PyBuffer_Release(&buffer);
    return found;
}

/* ---------------------------------------------------------------------------------------------------------- the type */

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    Py_ssize_t max_list_size;
    if (names != NULL && PyDict_Size(names) > 0)
        return PyErr_Format(PyExc_TypeError, "a decoder takes no arguments by name");
    if (!PyArg_ParseTuple(arguments, "n", &max_list_size))
        return NULL;
    if (max_list_size < 0)
        return PyErr_Format(PyExc_ValueError, "lists of headers of at most %zd bytes", max_list_size);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    decoder_t *self = (decoder_t *)allocate(type, 0);
    if (self != NULL) {
        self->max_list_size = (size_t)max_list_size;
        self->max_size = TABLE_SIZE;
    }
    return (PyObject *)self;
}

static void destroy(decoder_t *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    evict(self, 0);
    Py_XDECREF(self->common);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"decode", (PyCFunction)decode, METH_O, "See daemon/grpc/hpack_decoder.py."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, destroy},
    {Py_tp_methods, methods},
    {Py_tp_doc, "(max_list_size): see daemon/grpc/hpack_decoder.py."},
    {0, NULL},
};

static PyType_Spec spec = {"tensord.daemon.grpc._hpack.Decoder", sizeof(decoder_t), 0, Py_TPFLAGS_DEFAULT, slots};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tensord.daemon.grpc._hpack", "Decodes header blocks.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__hpack(void) {
    make_code();
    make_static_table();
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Decoder", type) || PyModule_AddStringMacro(module, SOURCES))
        Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
