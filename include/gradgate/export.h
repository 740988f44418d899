// Symbol visibility of the shared library: everything is hidden but what carries GRADGATE_API.
#pragma once

#define GRADGATE_API __attribute__((visibility("default")))
