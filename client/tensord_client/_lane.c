/* The client's part in C: it encodes and decodes records (common/include/tensord_wire.h), and makes the arrays of answers. */

#include "_lane.h"

/* Encoded records of one datagram have at most so many bytes together. */
#define ROOM (TENSORD_MAX_DATAGRAM - 8)
/* The most leases in one record, so that it fits into a datagram however large its numbers are. */
#define MAX_RELEASES 1024

struct names attr;
static PyTypeObject *answer_type, *output_type;
static PyObject *repeated_type;
PyObject *ndarray, *placed_type;

/* ------------------------------------------------------------------------------------------------------------------ writing */

/* Ends a writer that may have grown. Returns what was written as bytes, or NULL with an exception. */
static PyObject *made(tensord__writer *to) {
    PyObject *content = NULL;
    if (!to->full)
        content = PyBytes_FromStringAndSize((const char *)to->begin, to->at - to->begin);
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    free(to->grown);
    return content;
}

/* A converter of PyArg_ParseTuple: a number that is not negative. */
static int as_uint(PyObject *value, void *number) {
    *(uint64_t *)number = PyLong_AsUnsignedLongLong(value);
    return !PyErr_Occurred();
}

static void put_str(tensord__writer *to, PyObject *value) {
    PyObject *encoded = to->full ? NULL : PyUnicode_AsUTF8String(value);
    if (encoded == NULL) {
        to->full = 1;
        return;
    }
    tensord__text text = {PyBytes_AsString(encoded), (size_t)PyBytes_Size(encoded)};
    tensord__put_text(to, text);
    Py_DECREF(encoded);
}

static void put_int(tensord__writer *to, PyObject *value) {
    int too_large = 0;
    if (!PyLong_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%R cannot be encoded", (PyObject *)Py_TYPE(value));
        to->full = 1;
        return;
    }
    long long number = PyLong_AsLongLongAndOverflow(value, &too_large);
    if (too_large > 0)
        tensord__put_uint(to, PyLong_AsUnsignedLongLong(value));
    else
        tensord__put_int(to, number);
    if (too_large < 0 || PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%S needs more than 64 bits", value);
        to->full = 1;
    }
}

/* Writes an array of what a sequence has. */
void put_each(tensord__writer *to, PyObject *given, void (*put)(tensord__writer *, PyObject *)) {
    PyObject *list = to->full ? NULL : PySequence_List(given);
    if (list == NULL) {
        to->full = 1;
        return;
    }
    tensord__put_array(to, (uint64_t)PyList_Size(list));
    for (Py_ssize_t i = 0; i < PyList_Size(list) && !to->full; i++)
        put(to, PyList_GetItem(list, i));
    Py_DECREF(list);
}

void put_content(tensord__writer *to, PyObject *content) {
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(content, &at, &size))
        to->full = 1;
    else
        tensord__put_bytes(to, at, (size_t)size);
}

/* Writes what is encoded already. */
void put_encoded(tensord__writer *to, PyObject *encoded) {
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(encoded, &at, &size))
        to->full = 1;
    else
        tensord__put(to, at, (size_t)size);
}

/* Writes the value of a parameter. */
static void put_value(tensord__writer *to, PyObject *value) {
    if (PyUnicode_Check(value))
        put_str(to, value);
    else if (PyBool_Check(value))
        tensord__put_bool(to, value == Py_True);
    else if (PyFloat_Check(value))
        tensord__put_float(to, PyFloat_AsDouble(value));
    else
        put_int(to, value);
}

/* Writes (segment's number or region's name, offset, byte size), or None. */
static void put_place(tensord__writer *to, PyObject *place) {
    PyObject *where, *name;
    uint64_t numbers[2];
    if (place == Py_None) {
        tensord__put_nil(to);
        return;
    }
    if (!PyArg_ParseTuple(place, "OO&O&", &where, as_uint, &numbers[0], as_uint, &numbers[1])) {
        to->full = 1;
        return;
    }
    tensord__put_place(to);
    if (PyUnicode_Check(where)) {
        put_str(to, where);
    } else {
        name = PyUnicode_FromFormat("@%S", where);
        if (name == NULL)
            to->full = 1;
        else
            put_str(to, name);
        Py_XDECREF(name);
    }
    tensord__put_uints(to, numbers, 2);
}

/* Writes a field of a record: a text, True or False, or a number that is not negative. */
static void put_field(tensord__writer *to, PyObject *value) {
    uint64_t number;
    if (PyUnicode_Check(value))
        put_str(to, value);
    else if (PyBool_Check(value))
        tensord__put_bool(to, value == Py_True);
    else if (as_uint(value, &number))
        tensord__put_uint(to, number);
    else
        to->full = 1;
}

static PyObject *record(PyObject *module, PyObject *fields) {
    WRITER(to);
    (void)module;
    put_each(&to, fields, put_field);
    return made(&to);
}

static PyObject *integer(PyObject *module, PyObject *value) {
    WRITER(to);
    (void)module;
    put_int(&to, value);
    return made(&to);
}

static PyObject *release(PyObject *module, PyObject *leases) {
    uint64_t lease[3];
    WRITER(to);
    (void)module;
    Py_ssize_t count = PyList_Size(leases);
    if (count < 0)
        return NULL;
    tensord__put_release(&to, (uint64_t)count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyArg_ParseTuple(PyList_GetItem(leases, i), "O&O&O&", as_uint, &lease[0], as_uint, &lease[1], as_uint, &lease[2]))
            to.full = 1;
        tensord__put_lease(&to, lease);
    }
    return made(&to);
}

static PyObject *prepare(PyObject *module, PyObject *arguments) {
    uint64_t number;
    PyObject *prepared;
    WRITER(to);
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O&O", as_uint, &number, &prepared))
        return NULL;
    tensord__put_prepare(&to, number);
    put_encoded(&to, prepared);
    return made(&to);
}

/* Writes (name, datatype, shape, place). */
static void put_input(tensord__writer *to, PyObject *input) {
    PyObject *name, *datatype, *shape, *place;
    if (!PyArg_ParseTuple(input, "OOOO", &name, &datatype, &shape, &place)) {
        to->full = 1;
        return;
    }
    tensord__put_tensor(to);
    put_str(to, name);
    put_str(to, datatype);
    put_each(to, shape, put_int);
    put_place(to, place);
}

/* Writes (name, place). */
static void put_output(tensord__writer *to, PyObject *output) {
    PyObject *name, *place;
    if (!PyArg_ParseTuple(output, "OO", &name, &place)) {
        to->full = 1;
        return;
    }
    tensord__put_output(to);
    put_str(to, name);
    put_place(to, place);
    tensord__put_uint(to, 0);
}

static PyObject *prepared_request(PyObject *module, PyObject *arguments) {
    PyObject *model, *version, *inputs, *outputs, *parameters, *name, *value;
    Py_ssize_t at = 0;
    WRITER(to);
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOOO!", &model, &version, &inputs, &outputs, &PyDict_Type, &parameters))
        return NULL;
    tensord__put_prepared_request(&to);
    put_str(&to, model);
    put_int(&to, version);
    put_each(&to, inputs, put_input);
    put_each(&to, outputs, put_output);
    tensord__put_map(&to, (uint64_t)PyDict_Size(parameters));
    while (PyDict_Next(parameters, &at, &name, &value) && !to.full) {
        put_str(&to, name);
        put_value(&to, value);
    }
    return made(&to);
}

static PyObject *request(PyObject *module, PyObject *arguments) {
    uint64_t id;
    PyObject *prepared, *contents, *own;
    WRITER(to);
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O&OOO", as_uint, &id, &prepared, &contents, &own))
        return NULL;
    tensord__put_request(&to, id);
    put_encoded(&to, prepared);
    put_each(&to, contents, put_content);
    put_encoded(&to, own);
    return made(&to);
}

static PyObject *own_fields(PyObject *module, PyObject *arguments) {
    PyObject *client_id, *scheduling;
    uint64_t deadline_ns;
    WRITER(to);
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO&O!", &client_id, as_uint, &deadline_ns, &PyTuple_Type, &scheduling))
        return NULL;
    put_str(&to, client_id);
    tensord__put_u64(&to, deadline_ns);
    tensord__put_uint(&to, 0);
    for (Py_ssize_t i = 0; i < PyTuple_Size(scheduling) && !to.full; i++) {
        if (i == TENSORD_FIRST_SCHEDULING) {
            tensord__put_uint(&to, TENSORD_TIMING);
            tensord__put_uint(&to, 0);
        }
        put_field(&to, PyTuple_GetItem(scheduling, i));
    }
    return made(&to);
}

static PyObject *datagram(PyObject *module, PyObject *given) {
    WRITER(to);
    (void)module;
    tensord__put_byte(&to, TENSORD_WHOLE);
    put_each(&to, given, put_encoded);
    return made(&to);
}

/* ------------------------------------------------------------------------------------------------------------------ reading */

static PyObject *str_of(tensord__text text) {
    return PyUnicode_DecodeUTF8(text.at == NULL ? "" : text.at, (Py_ssize_t)text.size, NULL);
}

/* Sets an item of a named tuple, which takes it over. Not 0: making it has failed. */
static int set_field(PyObject *made, Py_ssize_t i, PyObject *item) {
    if (item != NULL)
        PyStructSequence_SetItem(made, i, item);
    return item == NULL;
}

/* Sets an item of a tuple, which takes it over. Not 0: making it has failed. */
static int set_item(PyObject *made, uint64_t i, PyObject *item) { return item == NULL || PyTuple_SetItem(made, (Py_ssize_t)i, item); }

PyObject *uints_of(const uint64_t *numbers, int count) {
    PyObject *found = PyTuple_New(count);
    for (int i = 0; found != NULL && i < count; i++)
        if (set_item(found, (uint64_t)i, PyLong_FromUnsignedLongLong(numbers[i])))
            Py_CLEAR(found);
    return found;
}

static PyObject *shape_of(tensord__tensor *tensor) {
    PyObject *shape = PyTuple_New((Py_ssize_t)tensor->rank);
    for (uint64_t i = 0; shape != NULL && i < tensor->rank; i++)
        if (set_item(shape, i, PyLong_FromLongLong(tensord__take_int(&tensor->shape))))
            Py_CLEAR(shape);
    return shape;
}

static PyObject *output_of(tensord__tensor tensor) {
    /* The caller knows the place; here it has to be text like any other. */
    PyObject *region = str_of(tensor.region), *made = region == NULL ? NULL : PyStructSequence_New(output_type);
    Py_XDECREF(region);
    if (made == NULL || set_field(made, 0, str_of(tensor.name)) || set_field(made, 1, str_of(tensor.datatype)) ||
        set_field(made, 2, shape_of(&tensor)) || set_field(made, 3, PyBool_FromLong(tensor.placed)))
        Py_CLEAR(made);
    return made;
}

/* Reads the value of a parameter. */
static PyObject *value_of(tensord__reader *from) {
    uint64_t number;
    double real;
    int kind = tensord__take_head(from, &number);
    if (kind == TENSORD__TEXT) {
        tensord__text text = {(const char *)tensord__take(from, number), (size_t)number};
        return str_of(text);
    }
    if (kind == TENSORD__BOOL)
        return PyBool_FromLong((long)number);
    if (kind != TENSORD__FLOAT)
        return kind == TENSORD__UINT ? PyLong_FromUnsignedLongLong(number) : PyLong_FromLongLong((int64_t)number);
    memcpy(&real, &number, sizeof real);
    return PyFloat_FromDouble(real);
}

/* Returns a prepared answer: an instance of the class. */
PyObject *prepared_of(tensord__prepared_answer *read, PyObject *prepared) {
    PyObject *outputs = PyTuple_New((Py_ssize_t)read->output_count), *parameters = PyDict_New();
    int wrong = outputs == NULL || parameters == NULL;
    for (uint64_t i = 0; !wrong && i < read->output_count; i++)
        wrong = set_item(outputs, i, output_of(tensord__take_tensor(&read->outputs)));
    for (uint64_t i = 0; !wrong && i < read->parameter_count; i++) {
        PyObject *name = str_of(tensord__take_text(&read->parameters));
        PyObject *value = name == NULL ? NULL : value_of(&read->parameters);
        wrong = value == NULL || PyDict_SetItem(parameters, name, value);
        Py_XDECREF(name);
        Py_XDECREF(value);
    }
    PyObject *made = wrong ? NULL : PyObject_CallFunction(prepared, "KOOO", (unsigned long long)read->version, outputs, parameters, read->final ? Py_True : Py_False);
    Py_XDECREF(outputs);
    Py_XDECREF(parameters);
    return made;
}

static PyObject *contents_of(tensord__answer *answer, uint64_t *byte_size) {
    PyObject *contents = PyTuple_New((Py_ssize_t)answer->count);
    for (uint64_t i = 0; contents != NULL && i < answer->count; i++) {
        tensord__content read = tensord__take_content(&answer->contents);
        const uint64_t place[3] = {read.segment, read.offset, read.byte_size};
        *byte_size += read.byte_size;
        if (set_item(contents, i,
                     read.bytes == NULL ? uints_of(place, 3) : PyBytes_FromStringAndSize((const char *)read.bytes, (Py_ssize_t)read.byte_size)))
            Py_CLEAR(contents);
    }
    return contents;
}

/* Returns the prepared answer with a number, or NULL with an exception. */
PyObject *find_prepared(PyObject *known, uint64_t number) {
    PyObject *found = number < TENSORD_MAX_NUMBERS ? PyList_GetItem(known, (Py_ssize_t)number) : Py_None;
    if (found == Py_None) {
        PyErr_Format(PyExc_ValueError, "number %llu was never prepared", (unsigned long long)number);
        return NULL;
    }
    Py_XINCREF(found);
    return found;
}

/* Returns None, or the three numbers. */
static PyObject *three_of(int there, const uint64_t *numbers) {
    if (there)
        return uints_of(numbers, 3);
    Py_RETURN_NONE;
}

static PyObject *answer_of(tensord__answer *answer, PyObject *known, PyObject *prepared) {
    uint64_t byte_size = TENSORD_RESPONSE_SIZE;
    PyObject *kind = answer->numbered ? find_prepared(known, answer->number) : prepared_of(&answer->prepared, prepared);
    PyObject *own = kind == NULL ? NULL : PyObject_GetAttr(kind, attr.own_count);
    PyObject *made = own == NULL ? NULL : PyStructSequence_New(answer_type);
    if (made != NULL && PyLong_AsUnsignedLongLong(own) != answer->count) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "%i tensors came in an answer prepared for %S", (int)answer->count, own);
        Py_CLEAR(made);
    }
    Py_XDECREF(own);
    if (made == NULL) {
        Py_XDECREF(kind);
        return NULL;
    }
    if (set_field(made, 1, kind) || set_field(made, 0, PyLong_FromUnsignedLongLong(answer->request_id)) ||
        set_field(made, 2, contents_of(answer, &byte_size)) || set_field(made, 3, three_of(answer->has_lease, answer->lease)) ||
        set_field(made, 4, str_of(answer->code)) || set_field(made, 5, str_of(answer->message)) ||
        set_field(made, 6, three_of(answer->has_timing, answer->timing)) || set_field(made, 7, PyLong_FromUnsignedLongLong(byte_size)))
        Py_CLEAR(made);
    return made;
}

/* Learns a prepared answer. Returns ("C+", number). */
static PyObject *learned(tensord__reader *from, PyObject *known, PyObject *prepared) {
    uint64_t number = tensord__take_uint(from);
    tensord__prepared_answer read = tensord__take_prepared_answer(from);
    from->bad |= number >= TENSORD_MAX_NUMBERS;
    PyObject *made = from->bad ? NULL : prepared_of(&read, prepared);
    if (made == NULL || PyList_SetItem(known, (Py_ssize_t)number, made))
        return NULL;
    return Py_BuildValue("sK", "C+", (unsigned long long)number);
}

/* Returns a record that is no answer. */
static PyObject *read_record(tensord__reader *from, tensord__text tag, uint64_t fields, PyObject *known, PyObject *prepared) {
    uint64_t read[2] = {0, 0};
    if (tensord__is(tag, "C+") && fields == 3)
        return learned(from, known, prepared);
    int count = tensord__take_numbers(from, tag, fields, read);
    if (from->bad)
        return NULL;
    return count == 1 ? Py_BuildValue("NK", str_of(tag), (unsigned long long)read[0])
                      : Py_BuildValue("NKK", str_of(tag), (unsigned long long)read[0], (unsigned long long)read[1]);
}

PyObject *records_of(tensord__reader *from, PyObject *known, PyObject *prepared, int (*take)(void *, const tensord__answer *), void *taker) {
    PyObject *found = PyList_New(0);
    for (uint64_t left = tensord__take_array(from); found != NULL && left > 0 && !from->bad; left--) {
        uint64_t fields = tensord__take_array(from);
        tensord__text tag = tensord__take_text(from);
        PyObject *record = NULL;
        if (tensord__is(tag, "c")) {
            tensord__answer answer = tensord__take_answer(from, fields);
            int taken = from->bad ? -1 : take == NULL ? 0 : take(taker, &answer);
            if (taken > 0)
                continue;
            record = taken < 0 ? NULL : answer_of(&answer, known, prepared);
        } else {
            record = read_record(from, tag, fields, known, prepared);
        }
        if (record == NULL || PyList_Append(found, record))
            Py_CLEAR(found);
        Py_XDECREF(record);
    }
    if (!PyErr_Occurred() && (found == NULL || from->bad || from->at != from->end)) {
        PyErr_SetString(PyExc_ValueError, "a datagram is no array of records");
        Py_CLEAR(found);
    }
    return found;
}

/* Sets a reader to bytes of a bytes or bytearray. Not 0: there is an exception. */
static int read_of(PyObject *content, Py_ssize_t at, Py_ssize_t end, tensord__reader *from) {
    int is_bytes = PyBytes_Check(content);
    if (!is_bytes && !PyByteArray_Check(content)) {
        PyErr_SetString(PyExc_TypeError, "bytes or a bytearray is expected");
        return -1;
    }
    const char *memory = is_bytes ? PyBytes_AsString(content) : PyByteArray_AsString(content);
    if (at < 0 || end < at || end > (is_bytes ? PyBytes_Size(content) : PyByteArray_Size(content))) {
        PyErr_SetString(PyExc_ValueError, "a value is cut off");
        return -1;
    }
    *from = tensord__read_from(memory + at, (size_t)(end - at));
    return 0;
}

static PyObject *records(PyObject *module, PyObject *arguments) {
    PyObject *content, *known, *prepared;
    Py_ssize_t at, end;
    tensord__reader from;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnnO!O", &content, &at, &end, &PyList_Type, &known, &prepared) || read_of(content, at, end, &from))
        return NULL;
    return records_of(&from, known, prepared, NULL, NULL);
}

/* --------------------------------------------------------------------------------------------------------- inputs of requests */

/* Returns whether an array is no view, or one of an array that is none; -1 with an exception. */
static int is_its_own(PyObject *array) {
    PyObject *base = PyObject_GetAttr(array, attr.base), *beneath;
    int is = base == NULL ? -1 : base == Py_None;
    if (is == 0 && (PyObject *)Py_TYPE(base) == ndarray) {
        beneath = PyObject_GetAttr(base, attr.base);
        is = beneath == NULL ? -1 : beneath == Py_None;
        Py_XDECREF(beneath);
    }
    Py_XDECREF(base);
    return is;
}

/* Appends an attribute of an object to a list. Not 0: there is an exception. */
static int append_attribute(PyObject *list, PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    int wrong = value == NULL || PyList_Append(list, value);
    Py_XDECREF(value);
    return wrong;
}

/* Appends what is said of an input to its request's kind, and its bytes to the contents. Returns whether it travels inside; -1 with an
 * exception. */
static int put_small(PyObject *name, PyObject *array, Py_ssize_t *room, PyObject *kind, PyObject *contents) {
    if ((PyObject *)Py_TYPE(array) != ndarray)
        return 0;
    PyObject *number = PyObject_GetAttr(array, attr.nbytes);
    Py_ssize_t size = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    if (size < 0)
        return -1;
    if (size > *room)
        return 0;
    *room -= size;
    int is = is_its_own(array);
    if (is <= 0)
        return is;
    if (PyList_Append(kind, name) || append_attribute(kind, array, attr.dtype) || append_attribute(kind, array, attr.shape))
        return -1;
    PyObject *content = PyObject_CallMethodObjArgs(array, attr.tobytes, NULL);
    int wrong = content == NULL || PyList_Append(contents, content);
    Py_XDECREF(content);
    return wrong ? -1 : 1;
}

static PyObject *small_inputs(PyObject *module, PyObject *arguments) {
    PyObject *inputs, *name, *array, *answer = NULL;
    Py_ssize_t room, at = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!n", &PyDict_Type, &inputs, &room))
        return NULL;
    PyObject *kind = PyList_New(0), *contents = PyList_New(0);
    int is = kind == NULL || contents == NULL ? -1 : 1;
    /* What numpy does may change a dict that another thread has: each is held while it is looked at. */
    while (is > 0 && PyDict_Next(inputs, &at, &name, &array)) {
        Py_INCREF(name);
        Py_INCREF(array);
        is = put_small(name, array, &room, kind, contents);
        Py_DECREF(name);
        Py_DECREF(array);
    }
    PyObject *fixed = is > 0 ? PyList_AsTuple(kind) : NULL;
    if (fixed != NULL)
        answer = PyTuple_Pack(2, fixed, contents);
    Py_XDECREF(fixed);
    Py_XDECREF(kind);
    Py_XDECREF(contents);
    if (is == 0)
        Py_RETURN_NONE;
    return answer;
}

/* ------------------------------------------------------------------------------------------------------- arrays of answers */

/* Returns whether an array that the caller gave has that shape and dtype; -1 with an exception. */
static int is_like(PyObject *place, PyObject *shape, PyObject *dtype) {
    PyObject *has = PyObject_GetAttr(place, attr.shape);
    int is = has == NULL ? -1 : PyObject_RichCompareBool(has, shape, Py_EQ);
    Py_XDECREF(has);
    if (is <= 0)
        return is;
    has = PyObject_GetAttr(place, attr.dtype);
    is = has == NULL ? -1 : PyObject_RichCompareBool(has, dtype, Py_EQ);
    Py_XDECREF(has);
    return is;
}

int put_array(PyObject *answer, PyObject *output, PyObject *places, const char *content, Py_ssize_t size) {
    PyObject *name = PyTuple_GetItem(output, 0), *shape = PyTuple_GetItem(output, 1), *dtype = PyTuple_GetItem(output, 2), *array;
    Py_ssize_t byte_size = dtype == NULL ? -1 : PyLong_AsSsize_t(PyTuple_GetItem(output, 3));
    if (PyErr_Occurred())
        return -1;
    PyObject *place = PyDict_GetItemWithError(places, name);
    if (byte_size < 0 || place != NULL) {
        int is = byte_size < 0 && place != NULL ? is_like(place, shape, dtype) : 0;
        return is > 0 && PyDict_SetItem(answer, name, place) ? -1 : is;
    }
    if (PyErr_Occurred())
        return -1;
    if (content == NULL || size != byte_size)
        return 0;
    PyObject *memory = PyByteArray_FromStringAndSize(content, size);
    array = memory == NULL ? NULL : PyObject_CallFunctionObjArgs(ndarray, shape, dtype, memory, NULL);
    int wrong = array == NULL || PyDict_SetItem(answer, name, array);
    Py_XDECREF(memory);
    Py_XDECREF(array);
    return wrong ? -1 : 1;
}

int has_content(PyObject *output) { return PyLong_AsSsize_t(PyTuple_GetItem(output, 3)) >= 0; }

static PyObject *arrays(PyObject *module, PyObject *arguments) {
    PyObject *answer, *outputs, *contents, *places;
    Py_ssize_t at = 0;
    int is = 1;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!", &PyDict_Type, &answer, &PyTuple_Type, &outputs, &PyTuple_Type, &contents, &PyDict_Type, &places))
        return NULL;
    for (Py_ssize_t i = 0; is > 0 && i < PyTuple_Size(outputs); i++) {
        PyObject *output = PyTuple_GetItem(outputs, i), *given = NULL;
        if (has_content(output) && at < PyTuple_Size(contents))
            given = PyTuple_GetItem(contents, at++);
        is = given != NULL && PyBytes_CheckExact(given) ? put_array(answer, output, places, PyBytes_AsString(given), PyBytes_Size(given))
                                                        : put_array(answer, output, places, NULL, 0);
    }
    if (is < 0)
        return NULL;
    return PyBool_FromLong(is && at == PyTuple_Size(contents));
}

/* ------------------------------------------------------------------------------------------------------------------- module */

/* Each is described in _lane.pyi. */
static PyMethodDef functions[] = {
    {"arrays", arrays, METH_VARARGS, NULL},
    {"datagram", datagram, METH_O, NULL},
    {"integer", integer, METH_O, NULL},
    {"own_fields", own_fields, METH_VARARGS, NULL},
    {"prepare", prepare, METH_VARARGS, NULL},
    {"prepared_request", prepared_request, METH_VARARGS, NULL},
    {"record", record, METH_VARARGS, NULL},
    {"records", records, METH_VARARGS, NULL},
    {"release", release, METH_O, NULL},
    {"request", request, METH_VARARGS, NULL},
    {"small_inputs", small_inputs, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyStructSequence_Field answer_fields[] = {{"request_id", NULL}, {"prepared", NULL}, {"contents", NULL},  {"lease", NULL}, {"code", NULL},
                                                 {"message", NULL},    {"timing", NULL},   {"byte_size", NULL}, {NULL, NULL}};
static PyStructSequence_Desc answer_description = {"tensord_client._lane.AnswerRecord", NULL, answer_fields, 8};
static PyStructSequence_Field output_fields[] = {{"name", NULL}, {"datatype", NULL}, {"shape", NULL}, {"placed", NULL}, {NULL, NULL}};
static PyStructSequence_Desc output_description = {"tensord_client._lane.OutputTensor", NULL, output_fields, 4};

static PyStructSequence_Field placed_fields[] = {{"prepared", NULL}, {"contents", NULL}, {"segments", NULL}, {"slot", NULL},
                                                 {"hold", NULL},     {"kept", NULL},     {NULL, NULL}};
static PyStructSequence_Desc placed_description = {"tensord_client._lane.Placed", NULL, placed_fields, 6};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tensord_client._lane", NULL, -1, functions, NULL, NULL, NULL, NULL};

static int add_constants(PyObject *module) {
    return PyModule_AddIntConstant(module, "MAX_DATAGRAM", TENSORD_MAX_DATAGRAM) ||
           PyModule_AddIntConstant(module, "MAX_NUMBERS", TENSORD_MAX_NUMBERS) ||
           PyModule_AddIntConstant(module, "MAX_RECORD", TENSORD_MAX_RECORD) || PyModule_AddIntMacro(module, MAX_RELEASES) ||
           PyModule_AddIntMacro(module, ROOM) || PyModule_AddIntMacro(module, SOURCE) ||
           PyModule_AddIntConstant(module, "WIRE_VERSION", TENSORD_WIRE);
}

#define INTERNED(text) || (attr.text = PyUnicode_InternFromString(#text)) == NULL

PyMODINIT_FUNC PyInit__lane(void) {
    if (0 NAMES(INTERNED))
        return NULL;
    PyObject *numpy = PyImport_ImportModule("numpy");
    ndarray = numpy == NULL ? NULL : PyObject_GetAttrString(numpy, "ndarray");
    Py_XDECREF(numpy);
    PyObject *module = ndarray == NULL ? NULL : PyModule_Create(&definition);
    const struct {
        const char *name;
        PyType_Spec *spec;
        PyObject **type;
    } made_of[] = {{"Exchange", &exchange_spec, &exchange_type}, {"Lock", &lock_spec, &lock_type},      {"Repeated", &repeated_spec, &repeated_type}};
    answer_type = module == NULL ? NULL : PyStructSequence_NewType(&answer_description);
    output_type = answer_type == NULL ? NULL : PyStructSequence_NewType(&output_description);
    placed_type = output_type == NULL ? NULL : (PyObject *)PyStructSequence_NewType(&placed_description);
    int wrong = placed_type == NULL || PyObject_SetAttrString(module, "Placed", placed_type) || PyObject_SetAttrString(module, "AnswerRecord", (PyObject *)answer_type) ||
                PyObject_SetAttrString(module, "OutputTensor", (PyObject *)output_type) || add_constants(module);
    for (size_t i = 0; !wrong && i < sizeof made_of / sizeof *made_of; i++) {
        *made_of[i].type = PyType_FromSpec(made_of[i].spec);
        wrong = *made_of[i].type == NULL || PyObject_SetAttrString(module, made_of[i].name, *made_of[i].type);
    }
    if (wrong)
        Py_CLEAR(module);
    return module;
}
