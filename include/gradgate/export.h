// Symbol visibility of the shared library: everything is hidden but what carries GRADGATE_API.
#pragma once

#if defined(GRADGATE_STATIC)
#define GRADGATE_API
#else
#define GRADGATE_API __attribute__((visibility("default")))
#endif
