// Everything a C++ trainer needs: sessions, communicators, codecs.
#pragma once

#include "gradgate/codec.h"            // IWYU pragma: export
#include "gradgate/communicator.h"     // IWYU pragma: export
#include "gradgate/device.h"           // IWYU pragma: export
#include "gradgate/device_exchange.h"  // IWYU pragma: export
#include "gradgate/exchange.h"         // IWYU pragma: export
#include "gradgate/mode.h"             // IWYU pragma: export
#include "gradgate/nccl.h"             // IWYU pragma: export
#include "gradgate/session.h"          // IWYU pragma: export
#include "gradgate/status.h"           // IWYU pragma: export
#include "gradgate/types.h"            // IWYU pragma: export
#include "gradgate/version.h"          // IWYU pragma: export
