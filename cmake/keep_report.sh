#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# keep_report.sh COMPILER ARGUMENTS...: runs the compiler. What it says goes to OBJECT.log, and to the terminal where it
# fails.
for argument; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
"$@" >"$object.log" 2>&1 || { status=$?; cat "$object.log" >&2; exit $status; }
