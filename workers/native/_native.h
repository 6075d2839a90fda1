/* Declarations that the files of this extension share. Each .c file holds one noun; this header declares what the others may use of it.
 *
 *     _native.c         the module: its functions, its one type, its constants
 *     _fast_path.c      FastPath: what Python tells it, and waiting for events
 *     _arrivals.c       datagrams that come on lanes: requests that can be run here wait, everything else goes to Python
 *     _runs.c           runs of waiting requests, and of one large request
 *     _sequences.c      what is asked of Python's planner for requests of sequences
 *     _lanes.c          answers, and sending them
 *     _plans.c          what is known of the requests of a kind: where tensors lie, which programs run them
 *     _output_memory.c  memory of ours for XLA's outputs; shares nothing with the files above
 *
 * No format of Python has a '#': one that was compiled with the headers of Python 3.13 is refused by earlier Pythons.
 *
 * Functions that return int return 0 for success, unless their comment says otherwise. A function that fails with a Python
 * exception set says so, or returns NULL.
 */

#ifndef TENSORD_NATIVE_H
#define TENSORD_NATIVE_H

#include "../../shm/_python.h"
#include "../../shm/common/include/tensord_wire.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* Constants that Python has as well. _native.c exports them; tests/workers/native/test_constants.py compares them. */
#define MAX_SEQUENCE_ID 128
#define MAX_SET_NAME 128
/* The parameter set that requests get which name none. */
#define MAIN_SET "main"
/* Descriptors in one datagram. */
#define MAX_FDS 4
/* The bit that asks for when the request was where. */
#define TIMESTAMPS 1
/* Words of the status page (shm/status_page.py): of the page, and of a slot, which says what one thread runs. */
#define PAGE_STATE 0
#define PAGE_SINCE 1
#define PAGE_BEAT 2
#define SLOT_MODEL 510
#define SLOT_SINCE 511

/* Constants that Python takes from here. */
/* Inputs, or outputs, of one request. */
#define MAX_TENSORS 16
/* Rows of one run; a slot has room for more requests than that. */
#define MAX_ROWS 128
/* Outputs of one run that can be offered memory. */
#define MAX_OFFERS 16
/* As in shm/durations.py: protocols, times that are measured of a request, and the most upper bounds of a histogram. */
#define PROTOCOLS 3
#define DURATION_KINDS 4
#define MAX_BUCKETS 32

/* Constants of C alone. */
/* A datagram's kind, and the head of an array of up to 65535 records. */
#define DATAGRAM_HEAD 4
#define MAX_ANSWER (TENSORD_MAX_DATAGRAM - DATAGRAM_HEAD)
/* Room for the datagrams of one iteration of the loop, of one lane and of all; another one is received while it is sure to fit. And
 * how many datagrams that may be of one lane, however small they are. */
#define RECEIVED (4 * (TENSORD_MAX_DATAGRAM + 1))
#define ALL_RECEIVED (4 * RECEIVED)
#define MAX_DATAGRAMS 256
/* Traced requests of one datagram that Python runs, beside others that are run here. */
#define MAX_ASIDE 16
/* While more requests than this came together no time is spent on polling: wake-ups are shared by them. */
#define FEW 4

/* ------------------------------------------------------------------------------------------------------------------ records */

/* The most bytes of the parts of an AnswerRecord: its head with at most MAX_TENSORS contents, and what is before or instead of bytes. */
#define ANSWER_RECORD_HEAD (3 + 9 + 9 + 1 + 2)
#define BIN_HEAD 5
#define SLICE_SIZE (3 + 3 * 9)
#define LEASE_SIZE (1 + 3 * 9)
/* No lease, no code, no message, no timeline, and the timing. */
#define TIMING_SIZE (4 + 1 + 3 * 9)
/* The moments of a timeline: names of up to TRACE_NAME bytes, and nanoseconds. */
#define TRACE_NAME 20
#define TRACE_MOMENTS 5
#define TIMELINE_SIZE (5 + TRACE_MOMENTS * (2 + TRACE_NAME + 9))
/* -------------------------------------------------------------------------------------------------------------------- plans */

typedef struct {
    char *address;
    /* Bytes from one row to the next. */
    size_t stride;
} argument_t;

typedef struct {
    PyObject *run;
    int rows, count;
    /* 1 if unused rows are zeroed before each run. */
    int clears;
    argument_t arguments[MAX_TENSORS];
} program_t;

typedef struct {
    uint64_t runs, ns[3];
} size_figures_t;

/* Statistics of requests that were answered here and well, for workers/models/statistics.py. */
typedef struct {
    uint64_t answered, rows, runs, request_ns, queue_ns, copied;
    /* Time for input, inference and output of each run, counted once for each of its requests. */
    uint64_t compute_ns[3];
    /* By the batch size that the model saw. */
    size_figures_t sizes[MAX_ROWS + 1];
} figures_t;

/* Requests that can share a run. Belongs to its plans and goes with the last of them. */
typedef struct batch {
    /* All batches of a FastPath, and the pointer to this one. */
    struct batch *next, **link;
    PyObject *owner;
    int plans;
    /* The model's key on the status page. */
    uint64_t model;
    uint64_t most_waiting;
    /* The work of a run for each row of its program, as a part of one iteration of the loop. */
    double share;
    /* How long its requests wait for others that can share a run; and how many rows do not wait for more. 0: none waits. */
    uint64_t delay_ns;
    int full;
    /* 1 if a run applies the model to each request by itself; and if its requests may have several parameter sets. */
    int grouped, mixes;
    /* The number of the program for one row, two rows, ... ``most`` rows; -1: Python runs so many. */
    int most;
    int programs[MAX_ROWS];
    int made;
    program_t *program;
    /* See _sequences.c. NULL: the model has no sequences. */
    PyObject *choose, *fail;
    figures_t figures;
    /* The histograms of the model version, which Python has as well (shm/durations.py): counts, and upper bounds in ns. */
    Py_buffer durations, bounds;
} batch_t;

typedef struct {
    int argument;
    size_t size;
    const char *region; /* NULL: the bytes are in the record */
} input_t;

typedef struct {
    /* Which of the run's results. LEASED: the output lies in the lease, ``start`` behind the lease's offset. */
    int stack;
    /* Where the first row of the run begins, from one row to the next, and the size for the whole request. */
    size_t start, step, size;
    char *region; /* NULL: the bytes go into the record */
} output_t;

#define LEASED (-1)

/* How requests of one kind are run and answered. */
typedef struct {
    batch_t *batch;
    /* ``inside``: outputs that the record has. */
    int rows, inputs, outputs, inside;
    /* Set when a run went wrong: Python runs such requests from then on. */
    int failed;
    /* The number of the answers. */
    uint64_t number;
    input_t input[MAX_TENSORS];
    output_t output[MAX_TENSORS];
    /* ``timeline_size``: what the answer of a traced request has besides. */
    size_t answer_size, timeline_size, copied;
    PyObject *intact; /* NULL: no tensor is in a region */
    /* Runs one large request by itself, see _runs.c. NULL: requests are gathered. */
    PyObject *alone;
    /* The bytes that follow the moments in timelines of requests that name no parameter set. NULL: traced requests are Python's. */
    PyObject *traced;
    /* The parameter sets that requests may name: name -> what runs get. NULL: requests that name one are Python's. */
    PyObject *sets;
} plan_t;

int refuse(const char *reason);
batch_t *make_batch(batch_t **batches, PyObject *given);
int read_tensors(PyObject *inputs, PyObject *outputs, plan_t *plan);
void drop_plan(plan_t **place);
int find_set(const plan_t *plan, tensord__text name, PyObject **set);
PyObject *take_figures(batch_t *batch);

/* -------------------------------------------------------------------------------------------------------------------- lanes */

/* Answers of a lane that are not sent yet. */
typedef struct answers {
    /* The next one of those that no lane uses. */
    struct answers *next;
    unsigned char content[TENSORD_MAX_DATAGRAM];
} answers_t;

typedef struct lane {
    /* All lanes, and the pointer to this one; and those that something came from in this iteration, if this is one of them. */
    struct lane *next, **previous, *next_active;
    struct fast_path *path;
    int fd, active;
    /* 1 if the socket did not take the answers. */
    int unsent;
    /* Requests in flight on a client's lane at most; 0: it is a front's, which is believed. */
    uint64_t most;
    uint64_t peer;
    /* The place in PROTOCOLS of shm/durations.py. */
    int protocol;
    /* A dict whose keys are the ids of the requests that Python has; and what is called with a datagram of released leases. */
    PyObject *in_flight, *take_back;
    /* By number; there is room for ``numbers``. */
    plan_t **plans;
    size_t numbers;
    /* NULL: there are none. Bytes, and records, of them. */
    answers_t *answer;
    size_t filled;
    uint64_t answers;
    /* Requests that wait, the highest id of them, and one more than the place of the first that is handed to Python. */
    uint64_t waits, last_id;
    size_t handed;
} lane_t;

typedef struct {
    lane_t *lane;
    plan_t *plan;
    /* The parameter set that it names, which its plan's ``sets`` own; NULL: it gets the main set. */
    PyObject *set;
    uint64_t id, arrived_ns;
    /* When it came here, if it is traced; 0: it is not. */
    uint64_t queued_ns;
    /* Its record, behind ``context`` bytes that say which trace it belongs to; ``size``: of both. */
    const unsigned char *record;
    size_t size, context;
    /* Its sequence: text, or where ``at`` is NULL a number. */
    tensord__text sequence_text;
    uint64_t sequence_id;
    int start, end;
    /* 1 if its answer says how long it took. */
    int timed;
    /* One more than the place of the lane's next request, where they are handed to Python. */
    size_t next;
    const unsigned char *contents[MAX_TENSORS];
} request_t;

/* When a run began, had its inputs, had its results, was answered. */
typedef uint64_t moments_t[4];

int in_flight(lane_t *lane, uint64_t id);
int has_room(const request_t *requests, int count);
int answer(const request_t *requests, int count, PyObject *made, const uint64_t *lease, const moments_t moments, uint64_t copied);
void flush(lane_t *lane);
void give_up_answers(lane_t *lane);

/* ---------------------------------------------------------------------------------------------------- arrivals and their runs */

typedef struct fast_path {
    PyObject_HEAD
    int epoll;
    /* begin and end of Python's Spin (shm/spin.py); NULL: there is no polling. */
    PyObject *spin_begin, *spin_end;
    /* When the last wait ended. */
    uint64_t ended;
    /* How many of the last requests that were served came together. */
    size_t together;
    /* The work of the runs since the last wait. */
    double done;
    _Atomic uint64_t *page;
    Py_buffer page_buffer;
    /* The word where the loop's slot begins. */
    size_t slot;
    /* Values of PAGE_STATE. */
    uint64_t idle, executing;
    /* All lanes, each also at the place of its descriptor among ``descriptors``; and those that something came from in this iteration. */
    lane_t *lanes, **by_descriptor, *active;
    size_t descriptors;
    batch_t *batches;
    answers_t *spare;
    /* Traced requests of the last datagram that Python runs, while the others of it are run here. */
    tensord__reader aside[MAX_ASIDE];
    size_t set_aside;
    /* Datagrams of waiting requests, and the bytes that they take. ``kept``: as much memory, for what waits beyond this iteration. */
    unsigned char *received, *kept;
    size_t used;
    /* Requests of clients' lanes that were served here, ever; and the count up to which they may be, until Python has looked at one. */
    uint64_t lane_requests, pass_until;
    /* Whether Python looks at requests of clients' lanes that belong to a trace, as their clients say. */
    int joins;
    /* The requests that wait are those from ``first`` to ``count``; there is room for ``room``. While they are served, the first
     * ``held`` places have those that go on waiting for others, the first of them until ``due_ns``. */
    request_t *waiting;
    size_t first, count, room, held;
    uint64_t due_ns;
    /* Set when an id came that may wait already. Only Python can tell, so nothing that waits is run here. */
    int doubtful;
    /* Called when answers of sequences have been sent; whether there are any; and whether Python has something to send. */
    PyObject *left;
    int sequenced, leave;
} fast_path_t;

extern PyType_Spec fast_path_spec;

lane_t *find_lane(fast_path_t *self, int fd);
int take(fast_path_t *self, lane_t *lane, PyObject *events, PyObject *datagrams);
void activate(fast_path_t *self, lane_t *lane);
int keep_held(fast_path_t *self);
void count_held(fast_path_t *self);
int give_back(fast_path_t *self, PyObject *datagrams);
int give_unsent(fast_path_t *self, PyObject *unsent);
int serve(fast_path_t *self, PyObject *datagrams);

extern PyMethodDef answer_methods[];

int choose_requests(const request_t *requests, int count);
int fail(fast_path_t *self, const request_t *requests, int count);
int tell_left(fast_path_t *self);

/* ------------------------------------------------------------------------------------------------------------ output memory */

/* The functions of the module. */
extern PyMethodDef output_memory_methods[];

/* ------------------------------------------------------------------------------------------------------------- small helpers */

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Appends a new reference, which it takes over. NULL: making it has failed, and so does this, with that exception. */
static inline int append(PyObject *list, PyObject *item) {
    int wrong = item == NULL || PyList_Append(list, item);
    Py_XDECREF(item);
    return wrong;
}

#endif
