/* interrupt.h - Ctrl-C asks a run to stop where it can go on from; a second one ends it at once. */
#ifndef INTERRUPT_H
#define INTERRUPT_H

#include <stdbool.h>

/* From now on. Where Ctrl-C is ignored, as behind nohup, it stays so. */
void interrupt_listen(void);

bool interrupt_asked(void);

#endif /* INTERRUPT_H */
