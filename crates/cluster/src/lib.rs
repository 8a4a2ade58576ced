//! Who is primary: terms, leases, heartbeats and failover as a pure state machine.
#![forbid(unsafe_code)]
