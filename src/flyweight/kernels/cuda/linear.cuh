// What the linears mean by FORMAT and EPILOGUE; gemv.py has the same numbers.
#define PLAIN 0
#define INT4 1
#define INT8 2
#define W8A8 3
#define STORE 0
#define RESIDUAL 1
#define SILU 2
