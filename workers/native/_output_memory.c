/* Offers XLA memory of ours for a program's outputs, on a CPU.
 *
 *     offer(byte_size, skip, address) ─▶ the program runs; after ``skip`` allocations of that size the next one gets that address
 *                                     ─▶ the output lies there ─▶ freeing it gives nothing back to the C library
 *
 * XLA cannot be told where an output goes: it asks the C library for memory. So the calls of XLA's libraries to posix_memalign and
 * free are redirected to this file, by the entries in those libraries' tables of imported functions; calls of other libraries are not.
 * Without an offer they are passed on to the C library.
 *
 * An offer holds for the calling thread, until it withdraws its offers. An address that XLA took is remembered until it is freed, by
 * any thread. MAX_HELD addresses can be remembered; beyond that, and wherever an offer does not fit, memory is allocated as usual. So
 * nobody may rely on an offer: the output's address says where it lies.
 */

#define _GNU_SOURCE
#include "_native.h"

#include <link.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_HELD 64
#define MAX_WATCHED 64

typedef struct {
    size_t byte_size;
    /* Allocations of that size that still come before. */
    size_t skip;
    void *address;
} offer_t;

typedef struct {
    size_t byte_size;
    void *address;
} allocation_t;

typedef struct {
    bool watching;
    size_t offer_count, watched_count;
    offer_t offers[MAX_OFFERS];
    allocation_t watched[MAX_WATCHED];
} thread_t;

static __thread thread_t thread;
/* Addresses that XLA took and has not freed; an address taken twice stands there twice. */
static _Atomic(void *) held[MAX_HELD];
static atomic_size_t held_count;

/* Replaces one entry of ``held``. Returns whether there was such an entry. */
static bool exchange(void *from, void *to) {
    for (size_t i = 0; i < MAX_HELD; i++) {
        void *expected = from;
        if (atomic_load_explicit(&held[i], memory_order_relaxed) == from &&
            atomic_compare_exchange_strong(&held[i], &expected, to))
            return true;
    }
    return false;
}

/* Returns the address that is offered for this allocation, or NULL. Counts it for the other offers of its size. */
static void *offered(thread_t *here, size_t alignment, size_t byte_size) {
    void *address = NULL;
    for (size_t i = 0; i < here->offer_count; i++) {
        offer_t *one = &here->offers[i];
        if (one->byte_size != byte_size)
            continue;
        if (one->skip-- == 0 && (uintptr_t)one->address % alignment == 0)
            address = one->address;
    }
    return address;
}

/* What XLA calls instead of posix_memalign. */
static int allocate(void **memory, size_t alignment, size_t byte_size) {
    thread_t *here = &thread;
    void *address = here->offer_count == 0 ? NULL : offered(here, alignment, byte_size);
    if (address != NULL && exchange(NULL, address)) {
        atomic_fetch_add(&held_count, 1);
        *memory = address;
        return 0;
    }
    int failure = posix_memalign(memory, alignment, byte_size);
    if (here->watching && failure == 0 && here->watched_count < MAX_WATCHED)
        here->watched[here->watched_count++] = (allocation_t){byte_size, *memory};
    return failure;
}

/* What XLA calls instead of free. */
static void release(void *memory) {
    if (memory != NULL && atomic_load(&held_count) != 0 && exchange(memory, NULL))
        atomic_fetch_sub(&held_count, 1);
    else
        free(memory);
}

/* ------------------------------------------------------------------------------- the tables of imported functions */

typedef struct {
    const char *folder;
    unsigned allocating, freeing, failed;
} search_t;

typedef struct {
    uintptr_t base;
    const ElfW(Sym) *symbols;
    const char *names;
    /* The range that the loader made read-only when everything was resolved (PT_GNU_RELRO). */
    uintptr_t sealed, sealed_end;
} library_t;

/* Writes an entry. Returns whether it could be written. */
static bool replace(const library_t *library, void **entry, void *function) {
    uintptr_t page_size = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)entry & ~(page_size - 1);
    bool sealed = (uintptr_t)entry >= library->sealed && (uintptr_t)entry < library->sealed_end;
    if (sealed && mprotect((void *)page, page_size, PROT_READ | PROT_WRITE) != 0)
        return false;
    __atomic_store_n(entry, function, __ATOMIC_RELEASE);
    return !sealed || mprotect((void *)page, page_size, PROT_READ) == 0;
}

/* Redirects the entries for the two functions in one table. */
static void redirect(search_t *search, const library_t *library, const ElfW(Rela) *relocation, size_t byte_size) {
    for (const ElfW(Rela) *end = relocation + byte_size / sizeof *relocation; relocation < end; relocation++) {
        size_t symbol = sizeof(void *) == 8 ? ELF64_R_SYM(relocation->r_info) : ELF32_R_SYM(relocation->r_info);
        /* An entry for a function holds its address and nothing else. */
        if (symbol == 0 || relocation->r_addend != 0)
            continue;
        const char *name = library->names + library->symbols[symbol].st_name;
        void **entry = (void **)(library->base + relocation->r_offset);
        bool allocates = strcmp(name, "posix_memalign") == 0;
        if (!allocates && strcmp(name, "free") != 0)
            continue;
        if (!replace(library, entry, allocates ? (void *)allocate : (void *)release))
            search->failed++;
        else if (allocates)
            search->allocating++;
        else
            search->freeing++;
    }
}

/* Redirects the entries of one library, if it is below the folder that is searched. Called by dl_iterate_phdr. */
static int look(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    search_t *search = data;
    if (strncmp(info->dlpi_name, search->folder, strlen(search->folder)) != 0)
        return 0;
    library_t library = {.base = info->dlpi_addr};
    const ElfW(Dyn) *entry = NULL;
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_DYNAMIC)
            entry = (const void *)(library.base + part->p_vaddr);
        if (part->p_type == PT_GNU_RELRO) {
            /* As in glibc: a page that the range covers only in part stays writable. */
            uintptr_t pages = ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1), start = library.base + part->p_vaddr;
            library.sealed = start & pages;
            library.sealed_end = (start + part->p_memsz) & pages;
        }
    }
    uintptr_t data_table = 0, call_table = 0;
    size_t data_table_size = 0, call_table_size = 0;
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        uintptr_t value = entry->d_un.d_ptr;
        switch (entry->d_tag) {
        case DT_SYMTAB: library.symbols = (const void *)value; break;
        case DT_STRTAB: library.names = (const void *)value; break;
        case DT_RELA: data_table = value; break;
        case DT_RELASZ: data_table_size = value; break;
        case DT_JMPREL: call_table = value; break;
        case DT_PLTRELSZ: call_table_size = value; break;
        }
    }
    /* glibc has turned offsets into addresses here; with a C library that has not nothing is redirected. */
    if ((uintptr_t)library.symbols < library.base || (uintptr_t)library.names < library.base)
        return 0;
    if (data_table >= library.base)
        redirect(search, &library, (const void *)data_table, data_table_size);
    if (call_table >= library.base)
        redirect(search, &library, (const void *)call_table, call_table_size);
    return 0;
}

/* ------------------------------------------------------------------------------------------------- the functions of the module */

static PyObject *redirect_allocations(PyObject *module, PyObject *folder) {
    (void)module;
    PyObject *encoded = NULL;
    if (!PyUnicode_FSConverter(folder, &encoded))
        return NULL;
    search_t search = {.folder = PyBytes_AsString(encoded)};
    dl_iterate_phdr(look, &search);
    Py_DECREF(encoded);
    return PyBool_FromLong(search.allocating != 0 && search.freeing != 0 && search.failed == 0);
}

static PyObject *watch_allocations(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    thread.watched_count = 0;
    thread.watching = true;
    Py_RETURN_NONE;
}

static PyObject *watched_allocations(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    thread.watching = false;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < thread.watched_count; i++) {
        const allocation_t *one = &thread.watched[i];
        if (append(list, Py_BuildValue("nK", (Py_ssize_t)one->byte_size, (unsigned long long)(uintptr_t)one->address)))
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *offer(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_ssize_t byte_size, skip;
    unsigned long long address;
    if (!PyArg_ParseTuple(arguments, "nnK", &byte_size, &skip, &address))
        return NULL;
    if (byte_size <= 0 || skip < 0 || address == 0)
        return PyErr_Format(PyExc_ValueError, "%zd bytes at %llu after %zd others", byte_size, address, skip);
    if (thread.offer_count == MAX_OFFERS)
        return PyErr_Format(PyExc_OverflowError, "%d offers at most", MAX_OFFERS);
    thread.offers[thread.offer_count++] = (offer_t){(size_t)byte_size, (size_t)skip, (void *)(uintptr_t)address};
    Py_RETURN_NONE;
}

static PyObject *withdraw_offers(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    thread.offer_count = 0;
    Py_RETURN_NONE;
}

static PyObject *holds(PyObject *module, PyObject *address) {
    (void)module;
    void *wanted = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred())
        return NULL;
    bool found = false;
    for (size_t i = 0; i < MAX_HELD && !found; i++)
        found = wanted != NULL && atomic_load(&held[i]) == wanted;
    return PyBool_FromLong(found);
}

PyMethodDef output_memory_methods[] = {
    {"redirect_allocations", redirect_allocations, METH_O,
     "Redirects the allocations of the libraries below a folder. Returns whether they import such functions and it succeeded."},
    {"watch_allocations", watch_allocations, METH_NOARGS, "Begins to note this thread's allocations."},
    {"watched_allocations", watched_allocations, METH_NOARGS, "Ends that. Returns byte size and address of the first of them, in order."},
    {"offer", offer, METH_VARARGS, "(byte_size, skip, address): offers memory for this thread's allocation of that size after ``skip`` others."},
    {"withdraw_offers", withdraw_offers, METH_NOARGS, "Ends this thread's offers."},
    {"holds", holds, METH_O, "Returns whether XLA took an address and has not freed it."},
    {NULL, NULL, 0, NULL},
};
