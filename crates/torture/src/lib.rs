//! Simulated hosts, fault injection and clients that verify every reply.
#![forbid(unsafe_code)]
