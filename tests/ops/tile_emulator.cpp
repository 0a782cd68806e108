// Emulation of AMX's tile instructions on x86-64 processors that lack them, so that the compiled kernels
// of the variant `amx` run instruction by instruction. Linked in place of native/tile_permission.cpp.
//
// Such an instruction raises SIGILL. The handler decodes it, computes with the calling thread's eight
// tiles, and continues behind it. An instruction that it does not know, or that AMX would refuse,
// goes to the handler that was there before. Products follow the pseudocode of Intel's Software
// Developer's Manual, computed by scalar instructions of the processor with subnormal numbers as zero.
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "tile_checks.h"

namespace {

std::atomic<int> num_configured{0};      // threads whose tiles are configured
std::atomic<int64_t> num_products{0};
bool is_refusing = false, is_wrong = false;

struct Tiles {
    bool is_configured;
    uint16_t row_bytes[8];
    uint8_t rows[8];
    uint8_t data[8][16][64];
};
thread_local Tiles tiles;

struct Instruction {
    int map, prefix, opcode, length;
    int reg, rm, vvvv;
    bool is_memory;
    uint64_t base, stride;  // with neither scale nor index, `base` is the address
};

uint64_t register_of(const ucontext_t* context, int number) {
    static const int INDEX[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[INDEX[number]];
}

int64_t displacement(const uint8_t* at, int bytes) {
    int8_t narrow;
    int32_t wide;
    std::memcpy(&narrow, at, 1), std::memcpy(&wide, at, 4);
    return bytes == 0 ? 0 : bytes == 1 ? narrow : wide;
}

// Decodes a VEX instruction of three prefix bytes without an immediate operand.
bool decode(const ucontext_t* context, Instruction& out) {
    const uint8_t* at = (const uint8_t*)context->uc_mcontext.gregs[REG_RIP];
    if (at[0] != 0xc4 || at[2] & 0x80 || at[2] & 4) return false;  // VEX, W0, 128 bits
    const int x = at[1] & 0x40 ? 0 : 8, b = at[1] & 0x20 ? 0 : 8;
    out.map = at[1] & 31, out.prefix = at[2] & 3, out.opcode = at[3];
    out.vvvv = ~(at[2] >> 3) & 15;
    const int mod = at[4] >> 6;
    out.reg = at[4] >> 3 & 7, out.rm = at[4] & 7, out.length = 5;
    out.is_memory = mod != 3;
    if (!out.is_memory) return true;
    int size = mod == 0 ? 0 : mod == 1 ? 1 : 4;
    out.stride = 0;
    if (out.rm == 4) {
        const int sib = at[5], index = (sib >> 3 & 7) | x, base = sib & 7;
        out.length = 6;
        if (index != 4) out.stride = register_of(context, index) << (sib >> 6);
        const bool has_base = !(base == 5 && mod == 0);
        if (!has_base) size = 4;
        out.base = has_base ? register_of(context, base | b) : 0;
    } else if (out.rm == 5 && mod == 0) {
        size = 4;
        out.base = (uint64_t)at + out.length + size;
    } else {
        out.base = register_of(context, out.rm | b);
    }
    out.base += displacement(at + out.length, size);
    out.length += size;
    return true;
}

bool configure(const uint8_t* memory) {
    if (memory[0] != 1) return false;
    for (int t = 0; t < 8; t++) {
        std::memcpy(&tiles.row_bytes[t], memory + 16 + 2 * t, 2);
        tiles.rows[t] = memory[48 + t];
        if (tiles.row_bytes[t] > 64 || tiles.rows[t] > 16) return false;
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
    if (!tiles.is_configured) num_configured++;
    tiles.is_configured = true;
    return true;
}

void release() {
    if (tiles.is_configured) num_configured--;
    tiles.is_configured = false;
}

void move(int tile, const Instruction& instruction, bool is_store) {
    for (int r = 0; r < tiles.rows[tile]; r++) {
        uint8_t* memory = (uint8_t*)(instruction.base + r * instruction.stride);
        if (is_store)
            std::memcpy(memory, tiles.data[tile][r], tiles.row_bytes[tile]);
        else
            std::memcpy(tiles.data[tile][r], memory, tiles.row_bytes[tile]);
    }
}

float element(const uint8_t* row, int index) {
    const uint8_t bytes[4] = {0, 0, row[2 * index], row[2 * index + 1]};
    float value;
    std::memcpy(&value, bytes, 4);
    return value;
}

__attribute__((target("fma"))) void multiply_add(float& sum, float a, float b) {
    sum = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(sum)));
}

void add(float& sum, float a) {
    sum = _mm_cvtss_f32(_mm_add_ss(_mm_set_ss(sum), _mm_set_ss(a)));
}

bool multiply(int c, int a, int b) {
    if (c == a || c == b || a == b) return false;
    if (tiles.rows[c] != tiles.rows[a] || tiles.row_bytes[c] != tiles.row_bytes[b] ||
        tiles.row_bytes[a] != 4 * tiles.rows[b])
        return false;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040);  // exceptions masked, to nearest even, subnormal numbers are zero
    const int columns = tiles.row_bytes[c] / 4;
    for (int m = 0; m < tiles.rows[c]; m++) {
        float sums[32] = {};
        for (int k = 0; k < tiles.rows[b]; k++)
            for (int n = 0; n < 2 * columns; n++)
                multiply_add(sums[n], element(tiles.data[a][m], 2 * k + n % 2),
                             element(tiles.data[b][k], n));
        for (int n = 0; n < columns; n++) {
            float whole;
            std::memcpy(&whole, &tiles.data[c][m][4 * n], 4);
            add(sums[2 * n], sums[2 * n + 1]);
            add(whole, sums[2 * n]);
            if (is_wrong) whole = __builtin_nextafterf(whole, 1e30f);
            std::memcpy(&tiles.data[c][m][4 * n], &whole, 4);
        }
    }
    _mm_setcsr(before);
    num_products++;
    return true;
}

enum { NONE, P66, PF3, PF2 };

bool emulate(const Instruction& i) {
    if (i.map != 2) return false;
    if (i.opcode == 0x49 && i.prefix == NONE && i.is_memory && i.reg == 0)
        return configure((const uint8_t*)i.base);
    if (!tiles.is_configured) return false;
    if (i.opcode == 0x49 && i.prefix == NONE && !i.is_memory) return release(), true;
    if (i.opcode == 0x49 && i.prefix == PF2 && !i.is_memory)
        return std::memset(tiles.data[i.reg], 0, sizeof tiles.data[i.reg]), true;
    if (i.opcode == 0x4b && i.is_memory && i.rm == 4 && i.prefix != NONE)
        return move(i.reg, i, i.prefix == PF3), true;
    if (i.opcode == 0x5c && !i.is_memory && i.prefix == PF3) return multiply(i.reg, i.rm, i.vvvv);
    return false;
}

struct sigaction previous;

void handle(int, siginfo_t*, void* raw) {
    ucontext_t* context = (ucontext_t*)raw;
    Instruction instruction;
    if (decode(context, instruction) && emulate(instruction))
        context->uc_mcontext.gregs[REG_RIP] += instruction.length;
    else
        sigaction(SIGILL, &previous, nullptr);
}

}  // namespace

// Begins to emulate.
bool tiles_are_permitted() {
    if (is_refusing) return false;
    static bool is_emulating = false;
    if (is_emulating) return true;
    is_emulating = true;
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGILL, &action, &previous) == 0;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int configured_threads() { return num_configured; }

EXPORT int64_t emulated_products() { return num_products; }

// Makes the system refuse tiles, or products differ from their definition in the last bit.
EXPORT void set_faults(int refusing, int wrong) { is_refusing = refusing, is_wrong = wrong; }
