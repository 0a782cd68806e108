#include "tile_checks.h"

#ifdef AMX
#include <sys/syscall.h>
#include <unistd.h>

bool tiles_are_permitted() {
    const long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif
