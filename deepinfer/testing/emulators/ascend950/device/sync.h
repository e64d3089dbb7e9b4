// Synchronisation between pipes and between the cores of a group.
#pragma once
#include "types.h"

enum { ASC_LOCK_BLOCK = 0 };
#define ASC_IS_AIC (emu::core() == 0)
#define ASC_IS_AIV (emu::core() != 0)
#define block_idx emu::block()

inline void asc_init() {}
inline int asc_get_sub_block_id() { return emu::core() - 1; }
inline void asc_sync_notify(pipe_t a, pipe_t b, event_t id) { emu::notify(a, b, id); }
inline void asc_sync_wait(pipe_t a, pipe_t b, event_t id) { emu::wait(a, b, id); }
inline void asc_sync_pipe(pipe_t p) { emu::barrier(p); }
inline void asc_sync() { emu::barrier(PIPE_ALL); }
inline void asc_lock(pipe_t p, int id, int) { emu::lock(p, id); }
inline void asc_unlock(pipe_t p, int id, int) { emu::unlock(p, id); }
inline void asc_sync_intra_arrive(pipe_t p, int flag) { emu::arrive(p, flag); }
inline void asc_sync_intra_wait(pipe_t p, int flag) { emu::await(p, flag); }
